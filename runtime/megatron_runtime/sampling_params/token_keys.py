"""Keys of the most likely tokens that do not depend on their texts, as vLLM writes them."""

from __future__ import annotations

_PREFIX = "token_id:"


def token_key(token_id: int) -> str:
    """``token_id:N``."""
    return f"{_PREFIX}{token_id}"


def token_of_key(key: str) -> int:
    """The inverse of ``token_key``; ValueError for another text."""
    return int(key.removeprefix(_PREFIX))

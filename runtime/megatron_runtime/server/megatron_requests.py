"""Requests of clients that were written for Megatron's server, such as those of its RL code (``--megatron-http``).

They have any model name or none, disable nucleus sampling with ``top_p: 0``, and expect the token ids of every chat
answer.
"""

from __future__ import annotations

from typing import Any


def from_megatron(body: Any, served_name: str) -> Any:
    """The same request for the OpenAI endpoints; a body that is not a JSON object is returned unchanged.

    ``top_p: 0`` beside a temperature disables nucleus sampling, as in Megatron's sampler; its RL code sends both. Alone
    it is greedy. Megatron's chat answers have token ids unless ``prevent_retokenization`` is false.
    """
    if not isinstance(body, dict):
        return body
    converted = {**body, "model": body.get("model") or served_name}
    if _is_zero(body.get("top_p")):
        converted["top_p"] = 1.0
        if body.get("temperature") is None:
            converted["temperature"] = 0.0
    if "messages" in body and body.get("prevent_retokenization") is not False:
        converted["return_tokenized_data"] = True
    return converted


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0

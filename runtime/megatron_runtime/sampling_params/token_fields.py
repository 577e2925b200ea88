"""Sampling parameters that consist of token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.sampling_params.ranges import Range, is_integer, is_number

_BIASES = Range(-100.0, 100.0)
_LONGEST_ID = 18
"""Maximum number of digits of a token id. Python itself limits the conversion of long texts to integers."""


def checked_biases(value: Any) -> dict[int, float] | None:
    """Token ids to biases; ids may come as text, since JSON has no other keys.

    Raises:
        InvalidRequestError: A key is no token id, or a bias is out of its range.
    """
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias={value!r} must map token ids to numbers", field="logit_bias")
    if not (_are_ids(value) and _are_biases(value.values())):
        _refuse_invalid(value)
    return {int(token): float(bias) for token, bias in value.items()}


def _are_ids(tokens: Collection[Any]) -> bool:
    """Whether all are integers or all are texts of digits, without a loop in Python, which would cost a millisecond for
    a thousand of them."""
    kinds = set(map(type, tokens))
    if kinds == {int}:
        return bool(min(tokens) >= 0)
    if kinds != {str} or "" in tokens:
        return False
    digits = "".join(tokens)
    return digits.isascii() and digits.isdigit() and max(map(len, tokens)) <= _LONGEST_ID


def _are_biases(biases: Collection[Any]) -> bool:
    """The same for biases. A NaN has no place in an order, so that the limits are compared with each of them."""
    return set(map(type, biases)) <= {int, float} and all(_BIASES.minimum <= bias <= _BIASES.maximum for bias in biases)


def _refuse_invalid(value: Mapping[Any, Any]) -> None:
    """Raises InvalidRequestError for the first entry that is invalid, if there is one."""
    for token, bias in value.items():
        is_id = is_integer(token) or (
            isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= _LONGEST_ID
        )
        if not is_id or int(token) < 0:
            raise InvalidRequestError(f"logit_bias: {token!r} is not a token id", field="logit_bias")
        if not is_number(bias) or bias not in _BIASES:
            raise InvalidRequestError(
                f"logit_bias: {bias!r} for token {token} must be a number {_BIASES}", field="logit_bias"
            )


def _are_token_ids(ids: Collection[Any]) -> bool:
    if set(map(type, ids)) == {int}:  # Without a loop in Python, which would take 10 ms for the longest list.
        return bool(min(ids) >= 0)
    return all(is_integer(i) and i >= 0 for i in ids)


def check_ids(name: str, ids: Any) -> None:
    """Raises InvalidRequestError unless ``ids`` is None or a list of token ids; ``name`` is the parameter."""
    if ids is not None and not (isinstance(ids, (list, tuple)) and _are_token_ids(ids)):
        raise InvalidRequestError(f"{name}={ids!r} must be a list of token ids", field=name)

"""Tensors as plain values for msgpack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TAG = "tensor"


def serialize_tensor(tensor: Tensor) -> list[Any]:
    """The tensor as nested lists."""
    nested: list[Any] = tensor.tolist()
    return nested


def deserialize_tensor(tensor_as_list: list[Any], dtype: torch.dtype | None = None) -> Tensor:
    """The tensor of nested lists; whole numbers become int64 and others float32, unless dtype says otherwise."""
    import torch  # imported here: clients and frontends do not need it

    return torch.tensor(tensor_as_list, dtype=dtype)


def encode_field(value: Any) -> Any:
    """A tensor as a tagged plain value that keeps its dtype; anything else as it is."""
    from torch import Tensor

    if not isinstance(value, Tensor):
        return value
    return (_TAG, serialize_tensor(value), str(value.dtype).removeprefix("torch."))


def decode_field(value: Any) -> Any:
    """The inverse of encode_field, also after msgpack has turned the tuple into a list.

    The tag alone also matches a list of two strings, so a tagged value has its dtype as a third item; the two items of
    Megatron's wire format are accepted if the second one is a list.
    """
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3) or value[0] != _TAG:
        return value
    if not isinstance(value[1], list):
        return value
    if len(value) == 2:
        return deserialize_tensor(value[1])
    import torch

    dtype = getattr(torch, value[2], None) if isinstance(value[2], str) else None
    return deserialize_tensor(value[1], dtype) if isinstance(dtype, torch.dtype) else value

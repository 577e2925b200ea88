"""Tensors and arrays as plain values for msgpack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

_TAG = "tensor"
_ARRAY_TAG = "ndarray"


def serialize_tensor(tensor: Tensor) -> list[Any]:
    """The tensor as nested lists."""
    nested: list[Any] = tensor.tolist()
    return nested


def deserialize_tensor(tensor_as_list: list[Any], dtype: torch.dtype | None = None) -> Tensor:
    """The tensor of nested lists; whole numbers become int64 and others float32, unless dtype says otherwise."""
    import torch  # imported here: clients and frontends do not need it

    return torch.tensor(tensor_as_list, dtype=dtype)


def serialize_ndarray(arr: NDArray[Any]) -> dict[str, Any]:
    """The array as nested lists, and the name of its dtype."""
    return {"data": arr.tolist(), "dtype": str(arr.dtype)}


def deserialize_ndarray(obj: Mapping[str, Any]) -> NDArray[Any]:
    """The inverse of serialize_ndarray."""
    import numpy as np  # imported here: clients and frontends do not need it

    return np.array(obj["data"], dtype=np.dtype(obj["dtype"]))


def unwrap_serialized_tensors(serialized_request: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy of a serialized request, with nested lists for its tensors and arrays."""
    return {name: _nested_lists(value) for name, value in serialized_request.items()}


def _nested_lists(value: Any) -> Any:
    if not _is_tagged(value):
        return value
    return value[1]["data"] if value[0] == _ARRAY_TAG else value[1]


def _is_tagged(value: Any) -> bool:
    """Whether the value is a tensor or an array, rather than a list that begins with the text of a tag."""
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        return False
    if value[0] == _ARRAY_TAG:
        return len(value) == 2 and isinstance(value[1], dict) and value[1].keys() == {"data", "dtype"}
    return value[0] == _TAG and isinstance(value[1], list)


def encode_field(value: Any) -> Any:
    """A tensor or an array as a tagged plain value that keeps its dtype; anything else as it is."""
    from numpy import ndarray
    from torch import Tensor

    if isinstance(value, ndarray):
        return (_ARRAY_TAG, serialize_ndarray(value))
    if not isinstance(value, Tensor):
        return value
    return (_TAG, serialize_tensor(value), str(value.dtype).removeprefix("torch."))


def decode_field(value: Any) -> Any:
    """The inverse of encode_field, also after msgpack has turned the tuple into a list.

    The tag alone also matches a list of two strings, so a tagged value has its dtype as a third item; the two items of
    Megatron's wire format are accepted if the second one is a list.
    """
    if not _is_tagged(value):
        return value
    if value[0] == _ARRAY_TAG:
        return deserialize_ndarray(value[1])
    if len(value) == 2:
        return deserialize_tensor(value[1])
    import torch

    dtype = getattr(torch, value[2], None) if isinstance(value[2], str) else None
    return deserialize_tensor(value[1], dtype) if isinstance(dtype, torch.dtype) else value

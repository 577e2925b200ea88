"""Arrays and tensors in serialized requests, and the length of a prompt that is left out."""

from __future__ import annotations

import msgpack
import numpy as np
import torch

from megatron_runtime.inference_request import (
    DynamicInferenceRequest,
    InferenceRequest,
    deserialize_ndarray,
    serialize_ndarray,
    unwrap_serialized_tensors,
)


def test_an_array_becomes_a_dict_and_back() -> None:
    array = np.array([[1, 2], [3, 4]], np.int16)
    assert serialize_ndarray(array) == {"data": [[1, 2], [3, 4]], "dtype": "int16"}
    back = deserialize_ndarray(serialize_ndarray(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_an_array_in_a_field_survives_the_wire() -> None:
    request = InferenceRequest(request_id=1, generated_tokens=np.array([7, 8], np.int32))
    sent = msgpack.unpackb(msgpack.packb(request.serialize()))
    assert sent["generated_tokens"] == ["ndarray", {"data": [7, 8], "dtype": "int32"}]
    back = InferenceRequest.deserialize(sent).generated_tokens
    assert (back.dtype, back.tolist()) == (np.int32, [7, 8])


def test_unwrapping_leaves_lists_for_tensors_and_arrays_and_nothing_else_changes() -> None:
    serialized = {
        "prompt_tokens": ("tensor", [1, 2], "int64"),
        "of_megatron": ["tensor", [3]],
        "array": ["ndarray", {"data": [4], "dtype": "int64"}],
        "text": ["tensor", "x"],
        "status": None,
    }
    unwrapped = unwrap_serialized_tensors(serialized)
    assert unwrapped == {
        "prompt_tokens": [1, 2],
        "of_megatron": [3],
        "array": [4],
        "text": ["tensor", "x"],
        "status": None,
    }
    assert serialized["prompt_tokens"] == ("tensor", [1, 2], "int64")


def test_a_request_knows_the_length_of_its_prompt_without_its_tokens() -> None:
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=torch.tensor([1, 2, 3]))
    assert request.prompt_length == 3
    sent = request.serialize()
    sent["prompt_tokens"] = None
    assert DynamicInferenceRequest.deserialize(sent).prompt_length == 3

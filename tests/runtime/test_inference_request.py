"""Requests, events and records, compared with the reference."""

from __future__ import annotations

import msgpack
import pytest
import torch

from megatron_runtime.errors import (
    BlockOverflowError,
    EngineError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
)
from megatron_runtime.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceRequest,
    Status,
    VLMInferenceRequest,
    deserialize_tensor,
    serialize_tensor,
)
from megatron_runtime.sampling_params import SamplingParams


def request_of(prompt_length: int = 8, **fields: object) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=1, prompt_tokens=torch.arange(prompt_length), sampling_params=SamplingParams(), **fields
    )


def journey(content: dict[str, object]) -> dict[str, object]:
    return msgpack.unpackb(msgpack.packb(content))


def test_hashes_are_computed_only_for_prefix_caching() -> None:
    assert request_of(block_size_tokens=4).precomputed_block_hashes == []
    assert len(request_of(block_size_tokens=4, enable_prefix_caching=True).precomputed_block_hashes) == 2
    given_hashes = request_of(block_size_tokens=4, enable_prefix_caching=True, precomputed_block_hashes=[7, 8])
    assert given_hashes.precomputed_block_hashes == [7, 8]


def test_a_tensor_becomes_a_list_and_back() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]])
    assert serialize_tensor(tensor) == [[1, 2], [3, 4]]
    assert torch.equal(deserialize_tensor([[1, 2], [3, 4]]), tensor)


def test_a_request_survives_msgpack() -> None:
    request = request_of(
        status=Status.FAILED, prompt_log_probs=[-0.5], generated_tokens=[4, 5], policy_staleness=torch.ones(10).int()
    )
    request.add_event_add_engine()
    request.add_event_generated_token(4, blocks_total=9)
    request.add_event_error_nontransient(MaxSequenceLengthOverflowError(1, "too long"))
    request.add_event_fail()
    content = request.serialize()
    assert "event_add_engine" not in content
    back = DynamicInferenceRequest.deserialize(journey(content))
    assert torch.equal(back.prompt_tokens, request.prompt_tokens)
    assert back.prompt_tokens.dtype == torch.int64
    assert back.policy_staleness is not None
    assert back.policy_staleness.dtype == torch.int32
    assert (back.status, back.generated_tokens, back.prompt_log_probs) == (Status.FAILED, [4, 5], [-0.5])
    assert back.sampling_params == request.sampling_params
    assert [event.type for event in back.events] == [event.type for event in request.events]
    assert back.events[1].payload == {"token_id": 4, "blocks_total": 9}
    assert isinstance(back.error, MaxSequenceLengthOverflowError)
    assert (str(back.error), back.error.request_id, back.error.is_transient) == ("too long", 1, False)


def test_a_pair_of_strings_is_not_decoded_as_a_tensor() -> None:
    request = request_of(generated_segments=["tensor", "x"], segments=["tensor", "x", "int64"])
    back = DynamicInferenceRequest.deserialize(journey(request.serialize()))
    assert back.generated_segments == ["tensor", "x"]
    assert back.segments == ["tensor", "x", "int64"]


def test_a_tensor_in_megatrons_format_is_decoded() -> None:
    back = InferenceRequest.deserialize({"request_id": 1, "prompt_tokens": ["tensor", [1, 2]], "added_later": 3})
    assert torch.equal(back.prompt_tokens, torch.tensor([1, 2]))


def test_the_old_name_of_sampling_params_warns() -> None:
    params = SamplingParams(top_k=3)
    with pytest.warns(DeprecationWarning, match="old name of sampling_params"):
        assert InferenceRequest(request_id=1, inference_parameters=params).sampling_params == params


def test_parameters_are_copied_into_a_request() -> None:
    params = SamplingParams(top_k=3)
    request = DynamicInferenceRequest(request_id=1, sampling_params=params)
    params.top_k = 9
    assert request.sampling_params is not None
    assert request.sampling_params.top_k == 3


def test_a_request_has_a_readable_string() -> None:
    request = request_of()
    assert str(request) == "id 1, [NOT ADDED], prompt len 8, gen len 0, num events 0"
    request.status = Status.COMPLETED
    request.generated_tokens = [1, 2]
    request.add_event_finish()
    assert str(request) == "id 1, COMPLETED, prompt len 8, gen len 2, num events 1"
    assert request.succeeded()
    assert not request.failed()


def test_metadata_has_the_order_and_types_of_its_description() -> None:
    request = request_of()
    names = [name for name, _, _ in DynamicInferenceRequest.get_metadata_types()]
    assert names[:4] == ["temperature", "top_k", "top_p", "termination_id"]
    assert [name for name, _, on_device in DynamicInferenceRequest.get_metadata_types() if on_device] == [
        "termination_id"
    ]
    with pytest.warns(UserWarning, match="no termination_id"):
        assert request.tracked_metadata == [1.0, 0, 0.0, -1, False, False, 0]
    assert request.tracked_metadata[3] == -1


def test_there_are_exactly_nine_event_types() -> None:
    assert [kind.name for kind in DynamicInferenceEventType] == [
        "ADD_ENGINE",
        "ADD_CONTEXT",
        "GENERATED_TOKEN",
        "PAUSE",
        "EVICT",
        "FINISH",
        "FAIL",
        "ERROR_TRANSIENT",
        "ERROR_NONTRANSIENT",
    ]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (DynamicInferenceEventType.FINISH, 1),
        (DynamicInferenceEventType.ERROR_TRANSIENT, None),
        (DynamicInferenceEventType.GENERATED_TOKEN, None),
        (DynamicInferenceEventType.GENERATED_TOKEN, {"token": 1}),
    ],
)
def test_an_event_requires_its_payload(kind: DynamicInferenceEventType, payload: object) -> None:
    with pytest.raises(AssertionError):
        DynamicInferenceEvent(type=kind, payload=payload)


def test_events_have_readable_strings() -> None:
    kinds = DynamicInferenceEventType
    token = DynamicInferenceEvent(type=kinds.GENERATED_TOKEN, timestamp=1.5, payload={"token_id": 7})
    error = DynamicInferenceEvent(type=kinds.ERROR_TRANSIENT, timestamp=2.0, payload=BlockOverflowError(1))
    assert str(DynamicInferenceEvent(type=kinds.PAUSE, timestamp=1.25)) == "[1.250] PAUSE"
    assert str(token) == "[1.500] GENERATED_TOKEN, token=7"
    assert str(error) == "[2.000] ERROR_TRANSIENT, BlockOverflowError"
    assert error.serialize()["payload"] == {
        "type": "BlockOverflowError",
        "request_id": 1,
        "message": "request 1 doesn't fit",
        "is_transient": True,
    }


def test_an_error_of_an_unknown_type_keeps_its_name() -> None:
    event = DynamicInferenceEvent(type=DynamicInferenceEventType.ERROR_NONTRANSIENT, payload=OSError("disk"))
    back = DynamicInferenceEvent.deserialize(journey(event.serialize()))
    assert isinstance(back.payload, EngineError)
    assert str(back.payload) == "OSError: disk"


def test_a_checkpoint_moves_the_answer_to_the_prompt() -> None:
    request = request_of(
        status=Status.ACTIVE_AND_GENERATING_TOKENS,
        block_size_tokens=4,
        enable_prefix_caching=True,
        generated_log_probs=[-1.0, -2.0, -3.0],
    )
    assert request.sampling_params is not None
    request.sampling_params.add_attributes({"num_tokens_to_generate": 10, "top_k": 4})
    request.add_event_add_engine()
    request.generated_tokens = [50, 51, 52, 53]
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    new = record[-1]
    assert new.prompt_tokens is not None
    assert new.sampling_params is not None
    assert new.prompt_tokens.tolist() == [*range(8), 50, 51, 52, 53]
    assert (new.sampling_params.num_tokens_to_generate, new.sampling_params.top_k) == (6, 4)
    assert new.event_add_engine is request.event_add_engine
    assert new.events == []
    assert new.precomputed_block_hashes[:2] == request.precomputed_block_hashes
    assert len(new.precomputed_block_hashes) == 3
    assert (new.generated_tokens, new.generated_log_probs, new.request_id) == ([], [], 1)


def test_a_checkpoint_of_a_request_that_was_never_added_adds_the_event() -> None:
    record = DynamicInferenceRequestRecord.from_request(request_of())
    record.checkpoint()
    assert [event.type for event in record[-1].events] == [DynamicInferenceEventType.ADD_ENGINE]


def test_merging_joins_what_was_generated_and_keeps_the_first_prompt() -> None:
    request = request_of(generated_log_probs=[-1.0], prompt="hi", ttft=0.25, prompt_log_probs=[-9.0])
    assert request.sampling_params is not None
    request.sampling_params.add_attributes({"num_tokens_to_generate": 10})
    request.add_event_add_engine()
    request.generated_tokens = [50]
    request.generated_text = "a"
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    record[-1].generated_tokens += [51, 52]
    record[-1].generated_log_probs = [-2.0, -3.0]
    record[-1].generated_text = "bc"
    record[-1].status = Status.COMPLETED
    record[-1].add_event_finish()
    record.latency = 1.5
    merged = record.merge()
    assert merged.prompt_tokens is not None
    assert merged.sampling_params is not None
    assert (merged.prompt, merged.prompt_tokens.tolist(), merged.ttft) == ("hi", list(range(8)), 0.25)
    assert merged.prompt_log_probs == [-9.0]
    assert merged.generated_tokens == [50, 51, 52]
    assert merged.generated_log_probs == [-1.0, -2.0, -3.0]
    assert merged.generated_top_n_logprobs is None
    assert (merged.generated_text, merged.generated_length) == ("abc", 3)
    assert (merged.status, merged.latency, merged.sampling_params.num_tokens_to_generate) == (
        Status.COMPLETED,
        1.5,
        10,
    )
    assert [event.type.name for event in merged.events] == ["ADD_ENGINE", "FINISH"]
    record[-1].generated_text = None
    assert record.merge().generated_text is None
    assert request.generated_tokens == [50]


def test_staleness_counts_the_updates_since_each_token() -> None:
    request = request_of()
    record = DynamicInferenceRequestRecord.from_request(request)
    request.generated_tokens += [1, 2, 3]
    record.increment_staleness()
    assert request.policy_staleness is not None
    assert request.policy_staleness.tolist() == [1] * 11
    request.generated_tokens += [4, 5, 6]
    record.increment_staleness()
    assert request.policy_staleness.tolist() == [2] * 11 + [1] * 3
    request.generated_tokens += [7]
    merged = record.merge()
    assert merged.policy_staleness is not None
    assert merged.kv_cache_staleness is not None
    assert merged.policy_staleness.tolist() == merged.kv_cache_staleness.tolist() == [2] * 11 + [1] * 3 + [0]
    assert merged.policy_staleness.dtype == torch.int32


def test_a_checkpoint_resets_the_staleness_of_the_cache_and_not_of_the_policy() -> None:
    record = DynamicInferenceRequestRecord.from_request(request_of())
    record[-1].generated_tokens += [1, 2]
    record.increment_staleness()
    record[-1].generated_tokens += [3]
    record.checkpoint()
    record.increment_staleness(policy_only=True)
    merged = record.merge()
    assert merged.policy_staleness is not None
    assert merged.kv_cache_staleness is not None
    assert merged.policy_staleness.tolist() == [2] * 10 + [1]
    assert merged.kv_cache_staleness.tolist() == [0] * 11


def test_staleness_without_updates_is_zero() -> None:
    record = DynamicInferenceRequestRecord.from_request(request_of())
    record.checkpoint()
    assert record[-1].policy_staleness is None
    merged = record.merge()
    assert merged.policy_staleness is not None
    assert merged.policy_staleness.tolist() == [0] * 8


def test_a_record_survives_msgpack() -> None:
    record = DynamicInferenceRequestRecord.from_request(request_of(generated_text="a"))
    record[-1].generated_tokens += [1]
    record.checkpoint()
    record[-1].generated_text = "b"
    record.latency = 2.5
    back = DynamicInferenceRequestRecord.deserialize(journey(record.serialize()))
    assert back.request_id == 1
    assert back.merge().generated_text == "ab"
    assert back.latency == back.merge().latency == 2.5


def test_a_request_with_images_is_refused_with_a_message() -> None:
    with pytest.raises(InvalidRequestError, match="read text only"):
        VLMInferenceRequest(request_id=1, imgs=torch.zeros(1, 3, 2, 2))
    assert not isinstance(DynamicInferenceRequest(request_id=1), VLMInferenceRequest)


def test_every_add_event_returns_the_event_it_added() -> None:
    request = request_of()
    error = ValueError("broken")
    returned = [
        request.add_event_add_engine(),
        request.add_event_add_context(),
        request.add_event_generated_token(7, blocks_total=4),
        request.add_event_pause(),
        request.add_event_evict(),
        request.add_event_finish(),
        request.add_event_fail(),
        request.add_event_error_transient(error),
        request.add_event_error_nontransient(error),
    ]
    assert len(returned) == len(request.events)
    assert all(event is added for event, added in zip(returned, request.events, strict=True))
    assert request.event_add_engine is returned[0]


def test_routing_indices_need_a_row_for_each_token_that_was_computed() -> None:
    request = request_of()
    request.generated_tokens = [1, 2]
    computed = request.total_tokens - 1
    request.routing_indices = torch.zeros(computed, 2, 1, dtype=torch.int32)
    restored = DynamicInferenceRequest.deserialize(request.serialize())
    assert restored.routing_indices is not None
    assert restored.routing_indices.shape == (computed, 2, 1)
    request.routing_indices = torch.zeros(computed + 1, 2, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match=f"has {computed + 1} rows, expected {computed}"):
        request.serialize()

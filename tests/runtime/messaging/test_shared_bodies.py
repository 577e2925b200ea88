"""Requests that differ in their seeds alone share one body: in the client, on the wire, in the coordinator and in the
engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.data_parallel_inference_coordinator.requests import RequestEntry
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.inference_client.outstanding import RequestFuture
from megatron_runtime.inference_client.requests import ClientRequests
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.batches import BATCH_BYTES, in_batches, with_bodies
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import MalformedMessage, decode, encode
from megatron_runtime.wire.items import Assignment, Submission, items

COUNT = 48
PROMPT = [5, 6, 7]
PARAMS = SamplingParams(num_tokens_to_generate=200)
UUID = bytes(16)


def submit(client: InferenceClient, streamed: dict[int, list[int]]) -> list[RequestFuture]:
    """Choices with the seeds 0, 1, ...; the odd ones stream."""
    body = client.shared_body(PROMPT, PARAMS)

    def start(seed: int) -> RequestFuture:
        tokens = streamed.setdefault(seed, [])
        on_update = (lambda update: tokens.extend(update.new_tokens)) if seed % 2 else None
        return client.add_request(body.with_seed(seed), on_update=on_update)

    return [start(seed) for seed in range(COUNT)]


async def check(futures: list[RequestFuture], streamed: dict[int, list[int]]) -> None:
    """Each answer is that of its seed."""
    for seed, result in enumerate(await asyncio.gather(*futures)):
        expected = expected_tokens(PROMPT, replace(PARAMS, seed=seed))
        assert result.generated_tokens == expected
        assert not seed % 2 or streamed[seed] == expected


def entries(fleet: Fleet) -> list[RequestEntry]:
    """The coordinator's, which runs in a thread of this process."""
    assert fleet.coordinator is not None
    return list(fleet.coordinator._core.dispatcher.requests.values())


async def test_a_shared_body_is_packed_kept_unpacked_and_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    pack, unpack, deserialize = RequestBody.pack, RequestBody.unpack, SamplingParams.deserialize
    monkeypatch.setattr(RequestBody, "pack", lambda body: calls.append("pack") or pack(body))
    monkeypatch.setattr(RequestBody, "unpack", lambda body: calls.append("unpack") or unpack(body))
    monkeypatch.setattr(SamplingParams, "deserialize", lambda data: calls.append("validate") or deserialize(data))
    async with Fleet(enable_prefix_caching=True, block_size_tokens=1) as fleet:
        fleet.start_coordinator()
        client = await fleet.connect()
        streamed: dict[int, list[int]] = {}
        futures = submit(client, streamed)
        await until(lambda: len(entries(fleet)) == COUNT, "the submission")
        kept = entries(fleet)
        assert len({id(entry.body) for entry in kept}) == len({id(entry.hashes) for entry in kept}) == 1
        assert kept[0].hashes
        fleet.add_engine()
        await check(futures, streamed)
    # The client validates the parameters in each result.
    assert calls == ["pack", "unpack"] + ["validate"] * (1 + COUNT)


async def test_requests_of_a_lost_engine_keep_their_seeds(fleet: Fleet) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.01)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    streamed: dict[int, list[int]] = {}
    futures = submit(client, streamed)
    await until(lambda: all(len(streamed[seed]) > 20 for seed in range(1, COUNT, 2)), "the first tokens")
    fleet.add_engine(FakeEngine(), group=1)
    await fleet.ready(client, 2)
    doomed.kill()
    await check(futures, streamed)


async def test_another_coordinator_gets_shared_bodies_again(fleet: Fleet) -> None:
    client = await fleet.connect()
    streamed: dict[int, list[int]] = {}
    futures = submit(client, streamed)
    await until(lambda: len(entries(fleet)) == COUNT, "the submission")
    await asyncio.to_thread(fleet.stop_coordinator)
    fleet.start_coordinator()
    await until(lambda: len(entries(fleet)) == COUNT, "the second submission")
    assert len({id(entry.body) for entry in entries(fleet)}) == 1
    fleet.add_engine()
    await check(futures, streamed)


async def test_a_shared_body_gets_a_random_seed_if_it_has_none(fleet: Fleet) -> None:
    body = (await fleet.connect()).shared_body(PROMPT, replace(PARAMS, seed=3))
    assert "seed" not in body.content.sampling_params
    assert body.with_seed(None).seed != body.with_seed(None).seed
    with pytest.raises(InvalidRequestError, match="prompt"):
        (await fleet.connect()).shared_body(7, PARAMS)  # type: ignore[arg-type]


def test_a_message_has_a_shared_body_once_whatever_its_size() -> None:
    large, other = bytes(2 * BATCH_BYTES), b"other"
    bodies = [large] * 60 + [other] * 2 + [large]
    submissions = [Submission(UUID, False, 0, [], seed) for seed in range(len(bodies))]
    batches = list(in_batches(zip(submissions, bodies, strict=True), shares=True))
    assert [[len(frame) for frame in frames] for _, frames in batches] == [[len(large), *[0] * 59], [5, 0, len(large)]]
    found = [pair for batch, frames in batches for pair in with_bodies(batch, frames)]
    assert found == list(zip(submissions, bodies, strict=True))


def test_an_empty_body_without_a_seed_is_no_reference() -> None:
    submissions = [Submission(UUID, False, 0, [], seed) for seed in (1, None, 2)]
    assert [body for _, body in with_bodies(submissions, [b"x", b"", b""])] == [b"x", b"", b"x"]
    assert [body for _, body in with_bodies(submissions[:1], [b""])] == [b""]


def test_requests_without_a_seed_of_their_own_are_sent_as_by_earlier_versions() -> None:
    assert Submission(UUID, False, 0, [1]).wire() == (UUID, False, 0, [1])
    assert Assignment(UUID, 1, False, 0).wire() == (UUID, 1, False, 0, 0)
    for item in (Submission(UUID, True, 3, [1], 2**64 - 1), Assignment(UUID, 1, True, 3, 7, 0)):
        message = decode(encode(Headers.SUBMIT_REQUEST, [item.wire()], bodies=[b"x"]))
        assert items(message, type(item).parse) == [item]


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, "1"])
def test_a_seed_that_is_no_natural_number_is_malformed(seed: object) -> None:
    for kind, fields in ((Submission, [UUID, False, 0, []]), (Assignment, [UUID, 1, False, 0, 0])):
        with pytest.raises(MalformedMessage, match="seed"):
            kind.parse([*fields, seed])  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [3 * 2**20, 5 * 2**20])
async def test_large_shared_bodies_arrive_within_the_flow_control(fleet: Fleet, size: int) -> None:
    """An engine is sent 8 MiB at once, and asks for others; a shared body counts once."""
    fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    prompt, params = "x" * size, SamplingParams(num_tokens_to_generate=3)
    body = client.shared_body(prompt, params)
    results = await asyncio.gather(*(client.add_request(body.with_seed(seed)) for seed in range(12)))
    expected = [expected_tokens(prompt, replace(params, seed=seed)) for seed in range(12)]
    assert [result.generated_tokens for result in results] == expected


@pytest.mark.parametrize("deserialize", [True, False])
async def test_large_parameters_are_not_sent_back_with_each_result(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, deserialize: bool
) -> None:
    """500 bad words with n=128 made replies of 2.4 MB."""
    replies: list[bytes] = []
    finish = ClientRequests._finish

    def noted(requests: ClientRequests, request_uuid: bytes, body: bytes) -> None:
        replies.append(body)
        finish(requests, request_uuid, body)

    monkeypatch.setattr(ClientRequests, "_finish", noted)
    fleet.add_engine()
    client = await fleet.connect(deserialize=deserialize)
    await fleet.ready(client, 1)
    words = [f"a bad word {number}" for number in range(500)]
    params = SamplingParams(num_tokens_to_generate=3, seed=1, bad_words=words, logit_bias={7: 1.0}, priority=4)
    result = await client.add_request(PROMPT, params)
    assert len(replies[0]) < len(codec.pack_body(words)) / 4
    if deserialize:
        assert result[0].sampling_params == params
    else:
        assert result["sampling_params"] == params.serialize()

"""Generation epochs, the ledger of finished requests, and the profiler, through the coordinator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine
from messaging_support.fleet import Fleet, until

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request import FinishedRequestRecord
from megatron_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=4, ignore_eos=True)


async def test_every_engine_gets_the_epoch_also_one_that_registers_later(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    for group in range(2):
        fleet.add_engine(engines[group], group=group)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    await client.set_generation_epoch(3)
    await client.pause_engines()
    await client.set_generation_epoch(4)
    await until(lambda: [engine.epochs for engine in engines[:2]] == [[3, 4]] * 2, "two epochs on two engines")
    fleet.add_engine(engines[2], group=2)
    await until(lambda: engines[2].epochs == [4], "the epoch on the third engine")


async def test_an_epoch_that_is_no_number_is_refused(fleet: Fleet) -> None:
    client = await fleet.connect()
    for epoch in (-1, 1.5, True, "2"):
        with pytest.raises(InvalidRequestError, match="generation_epoch"):
            client.set_generation_epoch(epoch)  # type: ignore[arg-type]


async def test_every_engine_starts_and_stops_its_profiler(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine()]
    for group, engine in enumerate(engines):
        fleet.add_engine(engine, group=group)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    await client.start_cuda_profiler()
    await client.add_request([1, 2], SamplingParams(num_tokens_to_generate=2, seed=1))
    await client.stop_cuda_profiler()
    await until(lambda: [engine.profiles for engine in engines] == [["start", "stop"]] * 2, "two traces")


async def test_the_ledger_has_the_finished_requests_by_the_uid_of_their_results(
    fleet: Fleet, tiny_parts: dict[str, Any]
) -> None:
    engine = DynamicInferenceEngine.build(tiny_parts["model"], tiny_parts["tokenizer"], tiny_parts["inference_config"])
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    unlisted = await client.add_request([1, 2, 3], GREEDY)
    engine.local_metadata_ledger_enabled = True
    await client.set_generation_epoch(2)
    results = await asyncio.gather(*(client.add_request([1, 2, 3], GREEDY) for _ in range(2)))
    failed = await client.add_request([10**6], GREEDY)
    ledger, engine.local_metadata_ledger = engine.local_metadata_ledger, {}
    assert ledger == {result.uid: FinishedRequestRecord([(0, 2)], [(0, 2)], 0) for result in results}
    assert len(ledger) == 2
    assert unlisted.uid not in ledger
    assert failed[-1].failed()

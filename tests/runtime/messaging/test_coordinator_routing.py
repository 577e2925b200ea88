"""Routing of requests, and its trace."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine
from messaging_support.fleet import Fleet, until

from megatron_runtime.config import PrefixCachingCoordinatorPolicy as Policy
from megatron_runtime.data_parallel_inference_coordinator import CoordinatorState, DataParallelInferenceCoordinator
from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry
from megatron_runtime.data_parallel_inference_coordinator.routing import PrefixTable, Router
from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.launch.routing_policy import coordinator_policy
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import EngineLoad

PARAMS = SamplingParams(num_tokens_to_generate=3, seed=5)


def entries(count: int) -> list[EngineEntry]:
    return [
        EngineEntry(
            f"engine {group}".encode(), group, 0, "x", EngineState.RUNNING, False, EngineLoad(), 0.0, ready=True
        )
        for group in range(count)
    ]


def test_round_robin_continues_when_engines_register_and_leave() -> None:
    router = Router(Policy.ROUND_ROBIN)
    three = entries(3)
    assert [router.pick(three, []) for _ in range(4)] == [three[0], three[1], three[2], three[0]]
    assert router.pick(three[:1], []) is three[0]
    assert router.pick([], []) is None


def test_load_balancing_chooses_the_engine_with_the_fewest_requests_and_the_first_of_equals() -> None:
    router = Router(Policy.LOAD_BALANCED)
    three = entries(3)
    three[0].owned = {b"a", b"b"}
    three[1].owned = {b"c"}
    three[2].owned = {b"d"}
    assert router.pick(three, []) is three[1]


def test_the_longest_known_prefix_decides_and_the_most_recent_engine_of_equals() -> None:
    router = Router(Policy.LONGEST_PREFIX)
    three = entries(3)
    router.record(three[1].identity, [1, 2, 3])
    router.record(three[2].identity, [1, 2])
    assert router.pick(three, [1, 2, 3, 4]) is three[1]
    assert router.pick(three, [1, 2, 9]) is three[2]
    assert router.pick(three, [9]) is three[0]
    router.forget(three[1].identity)
    assert router.pick(three, [1, 2, 3, 4]) is three[2]
    assert router.pick(three[:1], [1, 2]) is three[0]


@pytest.mark.parametrize("policy", [Policy.LONGEST_PREFIX, Policy.FIRST_PREFIX_BLOCK])
def test_a_prompt_with_an_unknown_prefix_goes_to_the_least_loaded_engines_in_turn(policy: Policy) -> None:
    router = Router(policy)
    three = entries(3)
    three[0].owned = {b"a"}
    assert [router.pick(three, [number]) for number in range(4)] == [three[1], three[2], three[1], three[2]]


async def test_the_second_request_with_the_same_prefix_goes_to_the_engine_that_has_it_cached() -> None:
    """By the default policy of a pod; round robin took the other engine."""
    policy = coordinator_policy("auto", prefix_caching=True)
    options = {"enable_prefix_caching": True, "prefix_caching_coordinator_policy": policy, "block_size_tokens": 4}
    async with Fleet(**options) as fleet:
        fleet.start_coordinator()
        engines = [FakeEngine(), FakeEngine()]
        for group, engine in enumerate(engines):
            fleet.add_engine(engine, group=group)
        client = await fleet.connect()
        await fleet.ready(client, 2)
        for _ in range(2):
            await client.add_request(list(range(40)), PARAMS)
        assert sorted(len(engine.added) for engine in engines) == [0, 2]


def test_the_first_block_policy_considers_the_first_block_only() -> None:
    router = Router(Policy.FIRST_PREFIX_BLOCK)
    two = entries(2)
    router.record(two[1].identity, [1, 2])
    assert router.pick(two, [1, 7]) is two[1]
    assert router.pick(two, [2]) is two[0]


@pytest.mark.parametrize(
    ("alpha", "owned", "chosen"),
    [(0.5, 7, 1), (0.5, 10, 1), (0.1, 10, 0), (0.1, 0, 1), (1.0, 10, 1), (0.0, 1, 0)],
)
def test_a_known_prefix_is_weighed_against_the_load(alpha: float, owned: int, chosen: int) -> None:
    router = Router(Policy.LONGEST_PREFIX, alpha=alpha, max_requests=10)
    two = entries(2)
    router.record(two[1].identity, [1])
    two[1].owned = {bytes([number]) for number in range(owned)}
    assert router.pick(two, [1]) is two[chosen]


def test_a_partly_known_prefix_is_weighted_by_its_fraction() -> None:
    router = Router(Policy.LONGEST_PREFIX, max_requests=10)
    two = entries(2)
    router.record(two[1].identity, [1])
    two[1].owned = {bytes([number]) for number in range(6)}
    assert router.pick(two, [1, 2]) is two[0]
    assert router.pick(two, [1]) is two[1]


def test_the_prefix_table_evicts_the_least_recently_used_hash() -> None:
    table = PrefixTable(size=3)
    one = entries(1)
    table.record(one[0].identity, [1, 2, 3])
    table.record(one[0].identity, [1])
    table.record(one[0].identity, [4])
    assert len(table) == 3
    assert table.holders([2], one) == (0, {})
    assert table.holders([1], one)[0] == 1


def test_the_prefixes_of_other_engines_stay_when_an_engine_is_lost() -> None:
    table = PrefixTable()
    one, two = entries(2)
    table.record(one.identity, [1, 2, 3])
    table.record(two.identity, [1, 2, 4])
    table.record(one.identity, [1])
    assert table.holders([1, 2], [one, two]) == (2, {one.identity: 1, two.identity: 2})
    assert table.holders([1], [one, two]) == (1, {one.identity: 3, two.identity: 2})
    table.forget(one.identity)
    assert table.holders([1, 2, 3], [one, two]) == (2, {two.identity: 2})
    assert len(table) == 3


async def test_the_routing_trace_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    async with Fleet(schedule_output_path=str(path), deterministic_mode=True, data_parallel_size=2) as fleet:
        fleet.start_coordinator()
        client = await fleet.connect()
        for group in (1, 0):
            fleet.add_engine(group=group)
            await fleet.ready(client, 2 - group)
        for number in range(3):
            await client.add_request(f"prompt {number}", PARAMS)
        client.shutdown_coordinator()
        await until(lambda: path.exists() and path.read_text().endswith("}\n"), "the schedule")
    assert json.loads(path.read_text()) == {
        "policy": "first_prefix_block",
        "data_parallel_size": 2,
        "num_requests": 3,
        "records": [
            {"request_id": 0, "rank_index": 0, "num_hashes": 0},
            {"request_id": 1, "rank_index": 1, "num_hashes": 0},
            {"request_id": 2, "rank_index": 0, "num_hashes": 0},
        ],
    }


async def test_prompts_with_the_same_prefix_go_to_the_same_engine() -> None:
    options = {
        "enable_prefix_caching": True,
        "deterministic_mode": True,
        "block_size_tokens": 4,
        "prefix_caching_coordinator_policy": "longest_prefix",
    }
    async with Fleet(**options) as fleet:
        coordinator = fleet.start_coordinator()
        engines = [FakeEngine(), FakeEngine()]
        for group, engine in enumerate(engines):
            fleet.add_engine(engine, group=group)
        client = await fleet.connect()
        await fleet.ready(client, 2)
        for tail in range(6):
            await client.add_request([1, 2, 3, 4, 5, 6, 7, 8, tail], PARAMS)
        assert sorted(len(engine.added) for engine in engines) == [0, 6]
        hashes = coordinator.compute_request_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert len(hashes) == 2
        favourite = coordinator.identities_of_data_parallel_ranks[0 if engines[0].added else 1]
        assert coordinator.get_best_data_parallel_rank(hashes) == favourite
        other = next(identity for identity in coordinator.identities_of_data_parallel_ranks if identity != favourite)
        coordinator._update_rank_hashes(other, hashes)
        assert coordinator.get_best_data_parallel_rank(hashes) == other


def test_choosing_an_engine_fails_without_engines() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 1)
    assert coordinator.state is CoordinatorState.RUNNING
    assert coordinator.compute_request_hashes([1] * 100) == []
    with pytest.raises(CoordinatorError, match="no engine is ready for requests"):
        coordinator.get_next_data_parallel_rank()
    coordinator.stop()
    coordinator.start()


def test_a_host_that_others_can_reach_needs_a_key_and_must_be_of_this_machine() -> None:
    with pytest.raises(ConfigurationError, match="only loopback addresses"):
        DataParallelInferenceCoordinator(None, 1, host="0.0.0.0")
    with pytest.raises(ConfigurationError, match="give an address of this machine"):
        DataParallelInferenceCoordinator(None, 1, host="192.0.2.1", key="k" * 32)


def test_a_result_is_detokenized_without_its_end_tokens() -> None:
    class Letters:
        eod = 0

        def detokenize(self, ids: list[int]) -> str:
            return "".join(chr(96 + token) for token in ids)

    coordinator = DataParallelInferenceCoordinator(None, 1, Letters())
    request: dict[str, Any] = {"generated_tokens": [1, 2, 0, 0], "prompt_tokens": ["tensor", [3]], "prompt": None}
    coordinator.detokenize(request)
    assert (request["generated_text"], request["prompt"]) == ("ab", "c")
    coordinator.stop()
    coordinator.start()


async def test_the_entry_point_runs_in_a_process_until_sigterm() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ready = context.Event()
    process = context.Process(
        target=DataParallelInferenceCoordinator.entrypoint,
        args=(sender, ready, 1, None, None, False, 16, True),
        kwargs={"request_timeout": 5.0},
        daemon=True,
    )
    process.start()
    sender.close()
    try:
        assert await asyncio.to_thread(ready.wait, 30)
        client = InferenceClient(receiver.recv())
        await client.start()
        assert (await client.service_state()).engines == ()
        client.shutdown_coordinator()
        await asyncio.to_thread(process.join, 20)
        assert process.exitcode == 0
        client.stop()
    finally:
        receiver.close()
        process.kill()
        process.join()
        process.close()

"""The library in one world over all replica groups, as torchrun starts it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import lock_step_scenarios, world_scenarios
from runtime_support.rank_processes import run_ranks
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.worker import free_port

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.world import World

TENSOR, BOTH = ParallelSizes(tensor=2), ParallelSizes(tensor=2, pipeline=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one architecture."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_checkpoint(folder / "old"), write_tiny_checkpoint(folder / "new", seed=4)


@cache
def alone(path: Path) -> dict[str, Any]:
    """The answers of one rank."""
    torch.set_num_threads(1)
    llm = world_scenarios.build(path)
    results = {
        name: world_scenarios.tokens(llm, getattr(world_scenarios, name)) for name in ("GREEDY", "DRAWN", "ENDLESS")
    }
    return results | {"parameters": sum(parameter.numel() for parameter in llm.controller.model.parameters())}


@pytest.mark.parametrize(("world_size", "sizes"), [(2, TENSOR), (4, BOTH)], ids=str)
def test_in_direct_mode_all_ranks_generate_the_same(
    world_size: int, sizes: ParallelSizes, checkpoints: tuple[Path, Path]
) -> None:
    results = run_ranks(world_scenarios.generate_directly, world_size, world_size, free_port(), sizes, *checkpoints)
    old, new = (alone(path) for path in checkpoints)
    for rank, result in enumerate(results):
        assert result["primary"]
        assert (result["greedy"], result["drawn"]) == (old["GREEDY"], old["DRAWN"])
        assert result["without seed"] == results[0]["without seed"]
        assert "rank 1 (tensor 1, stage 0) of replica group 0 has other arguments than rank 0" in result["error"]
        assert (result["version"], result["renewed"]) == (1, new["GREEDY"]), rank
        assert result["parameters"] < 0.6 * old["parameters"]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(2, ParallelSizes()), (2, TENSOR), (4, TENSOR)],
    ids=["data 2", "tensor 2", "tensor 2, data 2"],
)
def test_all_replica_groups_answer_through_the_coordinator_as_one_rank_does(
    world_size: int, sizes: ParallelSizes, checkpoints: tuple[Path, Path]
) -> None:
    results = run_ranks(world_scenarios.generate_together, world_size, world_size, free_port(), sizes, *checkpoints)
    old, new = (alone(path) for path in checkpoints)
    first = results[0]
    assert (first["greedy"], first["drawn"]) == (old["GREEDY"], old["DRAWN"])
    assert first["in flight"] == old["ENDLESS"]
    assert (first["renewed by files"], first["versions by files"]) == (new["GREEDY"], {1})
    assert (first["renewed by tensors"], first["versions by tensors"]) == (old["GREEDY"], {2})
    for rank, result in enumerate(results):
        assert (result["version by files"], result["version by tensors"], result["state"]) == (1, 2, "STOPPED")
        assert "nowhere" in result["errors"][0]
        assert "named tensors: 2 layers expected" in result["errors"][1]
        assert rank == 0 or "the primary rank (global rank 0), and this is rank" in result["refused"]
        assert result["steps"] > 0, f"rank {rank} had nothing to do"


@pytest.mark.parametrize(
    ("world_size", "sizes", "experts", "mode"),
    [
        (3, ParallelSizes(), 0, "persist"),
        (8, BOTH, 0, "recompute"),
        (8, ParallelSizes(tensor=2, pipeline=2, expert=2), 4, "offload"),
        (8, ParallelSizes(tensor=2, expert=4), 4, "recompute"),
    ],
    ids=[
        "data 3",
        "tensor 2, pipeline 2, data 2",
        "tensor 2, pipeline 2, expert 2, data 2",
        "tensor 2, expert 4, data 2",
    ],
)
def test_replica_groups_give_equal_answers_through_eviction_pause_and_suspension(
    world_size: int, sizes: ParallelSizes, experts: int, mode: str, tmp_path: Path
) -> None:
    path = write_tiny_checkpoint(tmp_path / "tiny", experts=experts)
    results = run_ranks(
        world_scenarios.serve_with_interruptions, world_size, world_size, free_port(), sizes, path, mode
    )
    expected = lock_step_scenarios.serve(lock_step_scenarios.build(path))
    copies = world_size // sizes.ranks_per_replica_group
    assert results[0]["is streaming"]
    assert results[0]["answers"] == [expected] * copies
    for first in range(0, world_size, sizes.ranks_per_replica_group):
        stats = results[first]["stats"]
        assert all(result["stats"] == stats for result in results[first : first + sizes.ranks_per_replica_group])
    assert sum(result["stats"].evictions_total for result in results) > 0
    assert sum(result["stats"].prefix_hits_total for result in results) > 0


def test_no_rank_misses_a_state_because_it_registers_late(checkpoints: tuple[Path, Path]) -> None:
    """Rank 0 returns from `start_listening_to_data_parallel_coordinator` when all replica groups are registered."""
    results = run_ranks(world_scenarios.follow_states, 2, 2, free_port(), checkpoints[0])
    assert results == 2 * [[state.name for state in world_scenarios.SIGNALS.values()]]


def test_an_answer_of_a_replica_group_can_be_streamed(checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.stream, 2, 2, free_port(), ParallelSizes(pipeline=2), checkpoints[0])
    assert results == [alone(checkpoints[0])["ENDLESS"][0], None]


def test_a_coordinator_that_can_not_start_raises_on_all_ranks(checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.miss_coordinator, 3, 3, free_port(), ParallelSizes(), checkpoints[0])
    assert "192.0.2.1" in results[0]
    assert all(result == f"rank 0 of the world could not start the coordinator: {results[0]}" for result in results[1:])


def test_a_running_engine_refuses_a_weight_update_on_every_rank(checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.update_while_running, 2, 2, free_port(), TENSOR, checkpoints[0])
    assert all("while the engine is RUNNING; pause it first" in result for result in results)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", ["direct", "coordinated"])
def test_a_killed_rank_ends_the_others_of_its_replica_group_and_is_named(
    mode: str, victim: int, checkpoints: tuple[Path, Path]
) -> None:
    results = run_ranks(world_scenarios.lose, 2, 2, free_port(), TENSOR, checkpoints[0], mode, victim, True)
    assert results[victim] is None
    other = results[1 - victim]
    assert f"rank {victim} (tensor {victim}, stage 0) is missing" in other["error"]
    assert other["seconds"] < 11.0


@pytest.mark.parametrize(("mode", "victim"), [("direct", 0), ("coordinated", 0), ("coordinated", 1)])
def test_a_failed_rank_ends_the_others_of_its_replica_group_at_once(
    mode: str, victim: int, checkpoints: tuple[Path, Path]
) -> None:
    results = run_ranks(world_scenarios.lose, 2, 2, free_port(), TENSOR, checkpoints[0], mode, victim, False)
    assert "the device is on fire" in results[victim]["error"]
    other = results[1 - victim]
    assert f"rank {victim} (tensor {victim}, stage 0) is missing" in other["error"]
    assert other["seconds"] < 11.0


@pytest.mark.parametrize("victim", [1, 3])
def test_other_replica_groups_serve_when_one_loses_a_rank(victim: int, checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.lose, 4, 4, free_port(), TENSOR, checkpoints[0], "coordinated", victim, True)
    assert results[victim] is None
    assert results[0]["answers"] == alone(checkpoints[0])["GREEDY"]
    assert victim == 1 or "rank 1 (tensor 1, stage 0) is missing" in results[2]["error"]
    assert all("error" not in results[rank] for rank in range(4) if rank // 2 != victim // 2)


def test_all_ranks_end_without_the_primary_rank(checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.lose, 4, 4, free_port(), TENSOR, checkpoints[0], "coordinated", 0, True)
    assert results[0] is None
    assert "rank 0 (tensor 0, stage 0) is missing" in results[1]["error"]
    assert "rank 0 of the world, which has the coordinator, is lost" in results[2]["error"]
    assert "rank 0 (tensor 0, stage 0) is missing" in results[3]["error"]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_join_the_world_is_named_by_the_others(absent: int) -> None:
    port = free_port()
    results = run_ranks(world_scenarios.miss, 3, absent, 3, port)
    for rank in {0, 1, 2} - {absent}:
        assert f"rank {rank} of the world: rendezvous at 127.0.0.1:{port}: rank {absent} did not" in results[rank]
        assert results[rank].endswith(f"; ({absent},)")


@pytest.mark.parametrize(("occasion", "slow"), [("join_world", 1), ("the start", 0), ("the start", 2)])
def test_a_late_rank_is_named_by_the_others(occasion: str, slow: int, checkpoints: tuple[Path, Path]) -> None:
    results = run_ranks(world_scenarios.join_late, 3, slow, free_port(), occasion, checkpoints[0])
    for rank in {0, 1, 2} - {slow}:
        words = f"rank {rank} of the world, at {occasion}: rank {slow} did not join within 4 s"
        assert results[rank] == f"{words}; ({slow},)"


def test_a_rank_killed_before_the_start_is_detected_at_once_by_its_replica_group(
    checkpoints: tuple[Path, Path],
) -> None:
    (words, seconds), died = run_ranks(world_scenarios.lose_before_start, 2, free_port(), checkpoints[0])
    assert died is None
    assert "barrier start" in words
    assert "rank 1 (tensor 1, stage 0) is missing" in words
    assert seconds < 11.0


def test_a_world_that_does_not_fit_the_sizes_is_refused_by_each_rank_before_the_rendezvous() -> None:
    (results,) = run_ranks(world_scenarios.refuse, 1, 3, free_port(), TENSOR)
    words = "the world has 3 ranks, but tensor 2 x pipeline 1 take 2 for each replica group; start a multiple"
    assert words in results
    with pytest.raises(ConfigurationError, match="the world has 4 ranks, but tensor 2 x pipeline 1 x data 3 need 6"):
        ParallelSizes(tensor=2, data=3).filling(4)
    assert ParallelSizes(tensor=2, expert=2).filling(6) == ParallelSizes(tensor=2, expert=2, data=3)
    assert ParallelSizes(expert=4).filling(8) == ParallelSizes(expert=4, data=2)
    with pytest.raises(ConfigurationError, match="the world has 6 ranks, but expert 4 x pipeline 1 take 4 for each"):
        ParallelSizes(tensor=2, expert=4).filling(6)


def test_ranks_of_a_world_have_their_replica_group_and_position() -> None:
    world = World(5, 8, 2)
    assert (world.replica_group, world.replica_groups, world.is_primary) == (2, 4, False)
    assert World.current() == World(0, 1)
    with pytest.raises(ConfigurationError, match="the world has 1 ranks, but tensor 2 x pipeline 1"):
        World.current(TENSOR.position_in_replica_group(1))

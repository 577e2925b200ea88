"""Communication between the ranks of a replica group, in real processes over gloo."""

from __future__ import annotations

import socket
from functools import cache
from typing import Any

import pytest
import torch
from runtime_support import group_scenarios
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.join import join_replica_group, replica_group_of_world
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.single_rank import SingleRank


@cache
def said_by(sizes: ParallelSizes) -> list[Any]:
    return run_ranks(group_scenarios.speak, sizes.ranks_per_replica_group, sizes, free_port())


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(tensor=4),
        ParallelSizes(tensor=2, pipeline=2),
        ParallelSizes(tensor=2, expert=4),
        ParallelSizes(pipeline=2, expert=2),
    ],
    ids=str,
)
def test_ranks_exchange_objects(sizes: ParallelSizes) -> None:
    said = said_by(sizes)
    for rank, heard in enumerate(said):
        place = sizes.position_in_replica_group(rank)
        assert heard["inbox"] == b"short"
        assert heard["large inbox"] == bytes(range(256)) * 100
        assert heard["empty inbox"] == b""
        assert heard["outcomes"] == [True] * 3
        assert heard["least"] == 97
        assert heard["large sum"] == [sum(place.tensor_peers)]
        assert heard["sum over experts"] == [sum(place.stage_peers)]
        assert heard["complaint"] == "rank 1 has something to say"
        assert heard["no complaint"] is None
        if place.tensor_rank == 0:
            columns = [float(peer) for peer in place.tensor_peers for _ in range(3 + (peer == place.tensor_peers[0]))]
            assert heard["gathered"].tolist() == [columns] * 2
        else:
            assert heard["gathered"] is None
        assert heard["received"] == [batch + 100.0 * place.stage for batch in range(2 * sizes.pipeline)]


def test_a_sum_is_alike_on_all_ranks_and_a_row_of_it_does_not_depend_on_the_others() -> None:
    said = said_by(ParallelSizes(tensor=4))
    parts = [torch.randn(7, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    for heard in said:
        torch.testing.assert_close(heard["sum"], sum(parts))
        assert torch.equal(heard["sum"], said[0]["sum"])
        assert torch.equal(heard["row alone"], heard["sum"][3:4])
        torch.testing.assert_close(heard["sum in bfloat16"].float(), sum(parts), atol=0.1, rtol=0.0)


def test_replica_groups_of_one_world_are_independent() -> None:
    sizes = ParallelSizes(tensor=2, pipeline=1, data=2)
    said = run_ranks(group_scenarios.speak_in_world, 4, sizes, free_port())
    assert [heard["name"] for heard in said] == [str(sizes.position(rank)) for rank in range(4)]
    assert [heard["inbox"].decode() for heard in said] == [f"inbox of replica group {rank // 2}" for rank in range(4)]
    assert [heard["least"] for heard in said] == [0, 0, 2, 2]
    assert [heard["sum"] for heard in said] == [1.0, 1.0, 5.0, 5.0]


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_reported_by_all_others_at_once(victim: int) -> None:
    sizes = ParallelSizes(tensor=2, pipeline=2)
    found = run_ranks(group_scenarios.fail, 4, sizes, free_port(), "death", victim)
    assert found.pop(victim) is None
    place = sizes.position_in_replica_group(victim)
    for noticed in found:
        assert noticed["missing"] == [victim], noticed
        assert f"rank {victim} (tensor {place.tensor_rank}, stage {place.stage}) is missing" in noticed["message"]
        assert noticed["seconds"] < 10.0


def test_a_late_rank_is_distinguished_from_a_lost_one() -> None:
    found = run_ranks(group_scenarios.fail, 2, ParallelSizes(tensor=2), free_port(), "stall", 1)
    assert "all ranks answer, so one is late; rank 1 is computing" in found[0]["message"]


def test_ranks_with_different_schedules_raise_an_error() -> None:
    found = run_ranks(group_scenarios.fail, 2, ParallelSizes(tensor=2), free_port(), "stray", 1)
    assert "its schedule has the checksum 2, that of rank 0 1; they no longer do the same" in found[1]["message"]


def test_a_barrier_names_missing_ranks() -> None:
    found = run_ranks(group_scenarios.miss_barrier, 3, ParallelSizes(tensor=3), free_port())
    for rank in (0, 2):
        assert "barrier resume, for up to 1 s: rank 1 (tensor 1, stage 0) is missing" in found[rank]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rendezvous_names_missing_ranks(absent: int) -> None:
    found = run_ranks(group_scenarios.miss_rendezvous, 3, ParallelSizes(tensor=3), free_port(), absent)
    found.pop(absent)
    for message in found:
        assert "rendezvous at 127.0.0.1:" in message
        assert f"rank {absent} did not" in message
        assert "within 2 s" in message


def test_waiting_ranks_use_no_processor() -> None:
    used = run_ranks(group_scenarios.use_processor, 2, ParallelSizes(pipeline=2), free_port())
    assert used[1] < 0.1


def test_a_single_rank_starts_no_processes_or_sockets() -> None:
    ranks = join_replica_group(ParallelSizes().position_in_replica_group(0, 5), host="nowhere.invalid", port=1, key="")
    assert isinstance(ranks, SingleRank)
    assert ranks.position.replica_group == 5
    assert isinstance(replica_group_of_world(ParallelSizes()), SingleRank)
    assert not torch.distributed.is_initialized()
    part = torch.ones(2, 3)
    assert ranks.sum(part) is part
    assert ranks.gather(part, [3]) is part
    assert ranks.share_inbox(b"it") == b"it"
    assert ranks.share_outcome(b"it", checksum=1).wait() == b"it"
    assert ranks.least(3) == 3
    assert ranks.first_error("no") == "no"
    ranks.barrier("resume")
    ranks.close()


def test_a_missing_torch_distributed_world_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"2 ranks are configured, but torch\.distributed has no world"):
        replica_group_of_world(ParallelSizes(tensor=2))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"rendezvous at 127.0.0.1:{port}: can't listen there"):
            join_replica_group(ParallelSizes(tensor=2).position(0), host="127.0.0.1", port=port, key="")

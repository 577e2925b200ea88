"""The layout of the ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition, share


def test_the_tensor_rank_turns_fastest_then_the_stage_then_the_replica() -> None:
    sizes = ParallelSizes(tensor=2, pipeline=3, data=2)
    found = [(place.tensor_rank, place.stage, place.replica_group) for place in map(sizes.position, range(12))]
    assert found == [(tensor, stage, data) for data in range(2) for stage in range(3) for tensor in range(2)]


def test_a_world_per_replica_counts_within_it() -> None:
    sizes = ParallelSizes(tensor=2, pipeline=2, data=3)
    for world_rank in range(sizes.world_size):
        replica, rank = divmod(world_rank, 4)
        assert sizes.position(world_rank) == sizes.position_in_replica_group(rank, replica)
    assert sizes.position_in_replica_group(0, 7).replica_group == 7


def test_every_role_has_one_rank_of_a_replica() -> None:
    places = [ParallelSizes(tensor=2, pipeline=3).position_in_replica_group(rank, 1) for rank in range(6)]
    assert [place.rank for place in places if place.is_first] == [0]
    assert [place.rank for place in places if place.samples] == [4]
    assert [place.rank for place in places if place.is_first_stage] == [0, 1]
    assert [place.rank for place in places if place.is_last_stage] == [4, 5]
    assert [list(place.tensor_peers) for place in places[::2]] == [[0, 1], [2, 3], [4, 5]]
    assert not any(place.is_primary for place in places)
    assert RankPosition().is_primary
    assert RankPosition().samples


@pytest.mark.parametrize(
    ("expert", "expected"),
    [
        (1, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        (2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (4, [(0, 0), (1, 0), (2, 0), (3, 0)]),
    ],
)
def test_experts_are_divided_over_the_ranks_of_a_layer_and_then_sliced(
    expert: int, expected: list[tuple[int, int]]
) -> None:
    places = [ParallelSizes(tensor=4, expert=expert).position(rank) for rank in range(4)]
    assert [(place.expert_group, place.expert_slice) for place in places] == expected


def test_more_expert_ranks_than_tensor_ranks_hold_copies_of_the_dense_layers() -> None:
    sizes = ParallelSizes(tensor=2, pipeline=2, expert=4)
    assert (sizes.ranks_per_stage, sizes.ranks_per_replica_group) == (4, 8)
    places = [sizes.position(rank) for rank in range(8)]
    assert [place.stage for place in places] == [0] * 4 + [1] * 4
    assert [place.tensor_rank for place in places] == [0, 1] * 4
    assert [place.dense_copy for place in places] == [0, 0, 1, 1] * 2
    assert [(place.expert_group, place.expert_slice) for place in places] == [(group, 0) for group in range(4)] * 2
    assert [list(place.tensor_peers) for place in places[::2]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {place.stage_peers for place in places[4:]} == {range(4, 8)}
    assert [place.rank for place in places if place.computes_logits] == [4, 5]
    assert [place.rank for place in places if place.samples] == [4]
    assert places[3].name == "rank 3 (tensor 1, expert 3, stage 0)"


@pytest.mark.parametrize(
    ("tensor", "expert", "data", "pipeline"), [(1, 8, 1, 2), (2, 8, 2, 1), (4, 2, 2, 1), (2, 2, 2, 2), (4, 1, 1, 2)]
)
def test_a_replica_is_the_smallest_world_that_megatron_lays_out_with_these_sizes(
    tensor: int, expert: int, data: int, pipeline: int
) -> None:
    sizes = ParallelSizes(tensor=tensor, expert=expert, pipeline=pipeline, data=data)
    expert_tensor = max(tensor // expert, 1)
    stage = sizes.ranks_per_stage
    assert stage % tensor == stage % (expert_tensor * expert) == 0
    assert all(smaller % tensor or smaller % (expert_tensor * expert) for smaller in range(1, stage))
    # Megatron's order within a stage: for dense layers tensor, then data; for experts expert tensor, then expert.
    for place in map(sizes.position, range(sizes.world_size)):
        assert place.stage_rank == place.dense_copy * tensor + place.tensor_rank
        assert place.stage_rank == place.expert_group * expert_tensor + place.expert_slice
        assert len(place.tensor_peers) == tensor
        assert place.tensor_peers.start % tensor == 0


@pytest.mark.parametrize(
    ("settings", "field", "complaint"),
    [
        ({"tensor": 0}, "tensor", "tensor parallel size is 0, expected a whole number of at least 1"),
        ({"pipeline": True}, "pipeline", "pipeline parallel size is True"),
        (
            {"tensor": 4, "expert": 3},
            "expert",
            "size is 3, .* 4 tensor parallel ranks; use one of 1, 2, 4",
        ),
        ({"tensor": 4, "expert": 6}, "expert", "size is 6, .* use one of 1, 2, 4, or a multiple of 4"),
    ],
)
def test_impossible_parallel_sizes_are_refused_with_the_remedy(
    settings: dict[str, int], field: str, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        ParallelSizes(**settings)
    assert refused.value.field == field


def test_unknown_ranks_are_refused() -> None:
    sizes = ParallelSizes(tensor=2, data=2)
    with pytest.raises(ConfigurationError, match="rank is 4, expected 0 to 3 in a world of 4"):
        sizes.position(4)
    with pytest.raises(ConfigurationError, match="rank is 2, expected 0 to 1, since tensor 2 x pipeline 1 are 2 ranks"):
        sizes.position_in_replica_group(2)
    with pytest.raises(ConfigurationError, match="replica group is -1"):
        sizes.position_in_replica_group(0, -1)
    with pytest.raises(ConfigurationError, match="the world has 3 ranks, but tensor 2 x pipeline 1 x data 2 need 4"):
        sizes.check_world(3)
    sizes.check_world(4)


def test_shares_are_neighbours_that_differ_by_one_at_most() -> None:
    for total in (1, 4, 7, 61):
        for parts in range(1, total + 1):
            shares = [share(total, parts, index) for index in range(parts)]
            assert [item for part in shares for item in part] == list(range(total))
            assert {len(part) for part in shares} <= {total // parts, total // parts + 1}
            assert [len(part) for part in shares] == sorted(map(len, shares), reverse=True)


def test_arithmetic_needs_no_torch() -> None:
    code = "import sys; import megatron_runtime.parallel.layout; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True, text=True)
    assert told.stdout.strip() == "False"

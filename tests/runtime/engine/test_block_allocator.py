"""The block allocator over random sequences of operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=80))
def test_blocks_are_never_leaked_or_allocated_twice(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(num_blocks)
    owners: list[list[int]] = []
    for allocates, number in actions:
        if allocates and allocator.can_allocate(number):
            owners.append(allocator.allocate(number))
            assert len(owners[-1]) == number
        elif owners:
            allocator.free(owners.pop(number % len(owners)))
        allocator.check_integrity(block for blocks in owners for block in blocks)
        assert allocator.num_free + allocator.num_used == num_blocks
    for blocks in owners:
        allocator.free(blocks)
    assert allocator.num_free == num_blocks


def test_a_block_freed_twice_is_noticed() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(blocks)


def test_a_pool_can_be_emptied_to_its_last_block() -> None:
    allocator = BlockAllocator(3)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]
    assert not allocator.can_allocate(1)
    assert allocator.can_allocate(0)

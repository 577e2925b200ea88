"""Assertions that the blocks and sequences of a scheduler are consistent."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.ordered_sequences import OrderedSequences
from megatron_runtime.engine.scheduling.schedule import SchedulerLimits
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.engine.scheduling.waiting_sequences import WaitingSequences


def check_integrity(
    allocator: BlockAllocator,
    running: OrderedSequences,
    waiting: WaitingSequences,
    paused: Collection[int],
    limits: SchedulerLimits,
) -> None:
    """Assert that these are consistent; ``paused`` are the request ids of running sequences that wait for a block."""
    allocator.check_integrity(block for sequence in running for block in sequence.blocks)
    by_id = {sequence.request_id: sequence for sequence in running}
    assert not any(each.request_id in by_id for each in waiting), "a sequence both runs and waits"
    assert len(running) <= limits.max_requests, "too many sequences run"
    assert by_id.keys() >= set(paused), "a sequence is paused that does not run"
    kept = sum(len(by_id[request_id].blocks) for request_id in paused)
    assert kept <= limits.paused_blocks, "paused sequences own more than they may"
    for sequence in running:
        _check_progress(sequence, limits.block_size_tokens)
    for sequence in waiting:
        assert not sequence.blocks, "a waiting sequence owns blocks"
        assert sequence.num_begun == sequence.num_computed == 0, "a waiting sequence has computed tokens"
    _check_sharing(running, limits.block_size_tokens)


def _check_progress(sequence: Sequence, block_size_tokens: int) -> None:
    """Assert that the tokens of a running sequence are computed in order, and have room."""
    room = len(sequence.blocks) * block_size_tokens
    assert sequence.num_computed <= sequence.num_begun, "tokens are computed that no pass has begun"
    assert sequence.num_begun <= min(room, len(sequence.tokens)), "computed tokens have no room"
    assert sequence.num_cached <= sequence.num_computed, "skipped tokens are not computed"


def _check_sharing(sequences: Iterable[Sequence], block_size_tokens: int) -> None:
    """Assert that the owners of a shared block have equal, computed tokens up to its end."""
    users: dict[int, tuple[Sequence, int]] = {}
    for sequence in sequences:
        for index, block in enumerate(sequence.blocks):
            other, position = users.setdefault(block, (sequence, index))
            if other is sequence:
                continue
            end = (index + 1) * block_size_tokens
            assert position == index, f"block {block} has two positions"
            assert sequence.tokens[:end] == other.tokens[:end], f"block {block} is shared by different prompts"
            assert min(sequence.num_computed, other.num_computed) >= end, (
                f"block {block} is shared before it is computed"
            )

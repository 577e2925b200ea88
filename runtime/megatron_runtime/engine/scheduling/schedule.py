"""What a scheduler may plan, and what it plans."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one forward pass."""

    max_requests: int
    max_tokens: int
    block_size_tokens: int
    chunked_prefill: bool
    paused_blocks: int = 0
    """Most blocks of sequences that wait for further ones."""
    passes_in_flight: int = 1
    """Most passes in flight; each one computes its share of the sequences."""
    shares_times: bool = True
    """Whether all ranks know the same times of passes, which decide how many drafts pay off."""
    mask_milliseconds: int = 5
    """Time for the slow masks of grammars, see `held_back`."""
    shared_rows: int | None = None
    """Rows of a pass with small bodies that large ones may fill, see `RowSharing`; None: any number."""
    prompt_logits: int | None = None
    """Most tokens of a pass with logits, besides one of each sequence and the drafts; None: any number."""

    def __post_init__(self) -> None:
        assert self.max_tokens >= self.max_requests, "every running sequence needs at least one token per pass"


@dataclass(frozen=True)
class Schedule:
    """One forward pass, and the changes that it needed."""

    slices: list[SequenceSlice]
    """The slices to compute; the most urgent sequence first."""
    admitted: list[Sequence]
    """Sequences that left the queue."""
    evicted: list[Sequence]
    """Sequences that lost their blocks and returned to the queue."""
    paused: list[Sequence]
    """Sequences that start to wait for a block and keep theirs; the most urgent first."""

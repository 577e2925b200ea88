"""The tokens of one request, and the progress of their computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_runtime.engine.scheduling.draft_length import DraftLength


@dataclass(eq=False)
class Sequence:
    """One request of the scheduler and the context.

    The known tokens need keys and values; the logits of the last one give the next token.
    """

    request_id: int
    tokens: list[int]
    """Prompt, then generated tokens."""
    prompt_length: int
    max_length: int
    """Maximum number of tokens."""
    priority: int = 0
    """Lower values are served first."""
    tenant: str = ""
    """Tenants have equal shares of a full engine."""
    body: str | None = None
    """Identifies the body among those of the tenant; None: no other sequence belongs to it."""
    answers: int = 1
    """Number of sequences of the body."""
    tag: float = 0.0
    """The order of equal priorities, see VirtualTime; equal for all sequences of a body."""
    arrival: int = 0
    """Number of sequences that were added before; the order of equal tags."""
    next_log_prob: int | None = None
    """Index of the first token whose log probability is still to be reported; None if there is none."""
    block_hashes: list[int] = field(default_factory=list)
    """One for each complete block of tokens that the prefix cache may have; empty without a prefix cache."""
    num_computed: int = 0
    """Number of leading tokens whose keys and values are computed."""
    num_begun: int = 0
    """Number of leading tokens that are computed, or that passes in flight compute."""
    num_cached: int = 0
    """Number of leading tokens that the prefix cache had when it last started to run."""
    num_registered: int = 0
    """Number of leading blocks that are registered in the prefix cache."""
    num_registrable: int = 0
    """Number of leading blocks that can be registered in the prefix cache."""
    snapshot_ends: list[int] = field(default_factory=list)
    """Numbers of leading tokens after which its recurrent states are to be copied, ascending; a pass ends at each."""
    first_snapshot: int | None = None
    """The slot of the recurrent states that it begins with, until its first pass has copied them."""
    blocks: list[int] = field(default_factory=list)
    """Its KV blocks, shared or not, in the order of its tokens."""
    pooling: str | None = None
    """The hidden states that are pooled: "last" (of the last token), "mean" (of all tokens) or None."""
    adapter: int | None = None
    """The slot of its adapter; None without one."""
    replayed_routing: Any = None
    """The experts to choose for its first tokens, as `ExpertRouting.parse` returns them."""
    draft_length: DraftLength | None = None
    """How many of its next tokens are drafted, if that is permitted. A PromptLookup drafts them, too."""
    num_drafts: int = 0
    """Number of its last tokens that are drafts, while a pass computes them."""
    row: int | None = None
    """Its row in the context's tables while it runs."""
    num_evictions: int = 0
    """How often it lost its blocks; distinguishes its runs."""
    mask_milliseconds: int = 0
    """Expected time to compute the mask of its grammar, see `note_mask`; 0 without a grammar."""
    last_pass: int = 0
    """Number of the last pass that computes tokens of it."""

    @property
    def order(self) -> tuple[int, float, int]:
        """Lower values are served first."""
        return self.priority, self.tag, self.arrival

    def drafts_within(self, length: int) -> int:
        """How many of the first ``length`` tokens are drafts."""
        return max(length - (len(self.tokens) - self.num_drafts), 0)

    def forget_prefixes(self) -> None:
        """Neither register its blocks in the prefix cache any more, nor leave snapshots of its states."""
        self.num_registered = self.num_registrable = 0
        self.snapshot_ends = []

    @property
    def num_left(self) -> int:
        """Number of known tokens that no pass computes yet, and that the next one can compute: 0 while a pass in flight
        ends where its states are to be copied, because the next tokens would change them first.
        """
        if self.snapshot_ends and self.num_begun == self.snapshot_ends[0]:
            return 0
        return len(self.tokens) - self.num_begun

    def note_mask(self, milliseconds: int) -> None:
        """Note how long its last mask took. The expectation falls by half at most, because the time depends on the
        place in the grammar, and the next slow place is often near."""
        self.mask_milliseconds = max(milliseconds, self.mask_milliseconds // 2)

    @property
    def is_running(self) -> bool:
        """True while it owns blocks."""
        return bool(self.blocks)


class SettledPass(NamedTuple):
    """What the engine has to do after a pass was computed, before the next one."""

    replaced: list[Sequence]
    """Sequences of which equal, known blocks replaced some."""
    snapshots: list[tuple[Sequence, int]]
    """Sequences whose recurrent states are to be copied to the slot of a snapshot, in this order."""


class SequenceSlice(NamedTuple):
    """The part of a sequence that one forward pass computes."""

    sequence: Sequence
    start: int
    end: int
    """Number of computed tokens after the pass."""
    samples: bool
    """True if its last token is the last known one, so that the logits give the next token."""
    num_log_probs: int
    """Number of last tokens whose logits are needed for the log probability of the next token."""
    num_evictions: int
    """Of the sequence, when the pass was begun."""
    drafts: tuple[int, ...] = ()
    """Tokens that may follow the known ones; the pass samples a token after each of them, too."""
    max_drafts: int = 0
    """Most drafts that a draft model proposes for the pass."""

    @classmethod
    def next_of(cls, sequence: Sequence, most: int, most_prompt_logits: int | None) -> SequenceSlice:
        """The slice for a pass with room for ``most`` tokens, of which ``most_prompt_logits`` and one more may have
        logits; None: all of them.
        """
        start, known, scored = sequence.num_begun, len(sequence.tokens), sequence.next_log_prob
        end = min(known, start + most)
        if sequence.snapshot_ends:
            end = min(end, sequence.snapshot_ends[0])
        num_log_probs = 0
        if scored is not None:
            first = max(start, scored - 1)
            if most_prompt_logits is not None:
                end = min(end, first + most_prompt_logits + 1)
            num_log_probs = max(0, end - first)
        return cls(sequence, start, end, end == known, num_log_probs, sequence.num_evictions)

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return self.end - self.start

    @property
    def counts(self) -> bool:
        """False once the sequence has lost the blocks that the pass writes to."""
        return self.num_evictions == self.sequence.num_evictions

    @property
    def num_pooled(self) -> int:
        """Number of last tokens whose hidden states are pooled."""
        if self.sequence.pooling == "mean":
            return self.length
        return int(self.samples and self.sequence.pooling is not None)

    @property
    def num_logits(self) -> int:
        """Number of last tokens whose logits are needed."""
        return max(self.num_log_probs, int(self.samples))

    @property
    def num_prompt_logits(self) -> int:
        """The same, less the one that each slice may have."""
        return max(self.num_log_probs - 1, 0)

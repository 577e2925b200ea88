"""The tokens of one request and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class Sequence:
    """One request as the scheduler and the context see it.

    The tokens known so far need keys and values; the last one's logits give the next token.
    """

    request_id: int
    tokens: list[int]
    """Prompt, then generated tokens."""
    prompt_length: int
    max_length: int
    """Tokens at which the sequence ends at the latest."""
    priority: int = 0
    """Lower ones come first."""
    arrival: int = 0
    """Counts the sequences that came to the scheduler before; decides among equal priorities."""
    next_log_prob: int | None = None
    """Index of the first token whose log probability is still wanted; None if none are wanted."""
    block_hashes: list[int] = field(default_factory=list)
    """One for each complete block of the tokens that may be found in the prefix cache; empty if none may."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    num_begun: int = 0
    """Leading tokens that are in the cache or being computed by passes in flight."""
    num_cached: int = 0
    """Leading tokens that were computed already, by others or before an eviction, when it last began to run."""
    num_registered: int = 0
    """Leading blocks that the prefix cache knows."""
    num_registrable: int = 0
    """Leading blocks that the prefix cache may know once they are computed."""
    blocks: list[int] = field(default_factory=list)
    """The KV blocks it owns, alone or with others, in the order of its tokens."""
    row: int | None = None
    """Its row in the context's tables while it runs."""
    life: int = 0
    """How often it lost its blocks."""

    @property
    def turn(self) -> tuple[int, int]:
        """Lower ones are served first."""
        return self.priority, self.arrival

    @property
    def num_left(self) -> int:
        """Tokens that no pass computes yet; none while the next one is awaited."""
        return len(self.tokens) - self.num_begun

    @property
    def is_running(self) -> bool:
        """True while it owns blocks."""
        return bool(self.blocks)


class SequenceSlice(NamedTuple):
    """The part of a sequence that one forward pass computes."""

    sequence: Sequence
    start: int
    end: int
    """Tokens that are computed afterwards."""
    samples: bool
    """True if the last token is the last known one, so that its logits give the next token."""
    num_log_probs: int
    """Trailing tokens whose logits are wanted for log probabilities: of the tokens after each of them."""
    life: int
    """Of the sequence, when the pass was begun."""

    @classmethod
    def next_of(cls, sequence: Sequence, most: int) -> SequenceSlice:
        """What a pass that takes up to so many tokens has to compute."""
        start, known, wanted = sequence.num_begun, len(sequence.tokens), sequence.next_log_prob
        end = min(known, start + most)
        num_log_probs = 0 if wanted is None else max(0, end - max(start, wanted - 1))
        return cls(sequence, start, end, end == known, num_log_probs, sequence.life)

    @property
    def length(self) -> int:
        """Tokens to compute."""
        return self.end - self.start

    @property
    def counts(self) -> bool:
        """False once the sequence has lost the blocks that the pass writes to."""
        return self.life == self.sequence.life

    @property
    def num_logits(self) -> int:
        """Trailing tokens whose logits are wanted for any reason."""
        return max(self.num_log_probs, int(self.samples))

"""The drafts of passes: proposes them, and notes what they cost and yield."""

from __future__ import annotations

from collections.abc import Sequence as Slices

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.draft_model import DraftModel
from megatron_runtime.engine.scheduling.goodput import Goodput
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.model.decoder import Decoder


class Drafter:
    """The drafts of one engine.

    Args:
        context: Has the draft model of its configuration, if there is one.
        model: The served model.
        goodput: Of the scheduler, if it has one.

    Raises:
        ConfigurationError: The draft model does not fit, as in `DraftModel`.
    """

    def __init__(self, context: DynamicInferenceContext, model: Decoder, goodput: Goodput | None) -> None:
        draft = context.config.speculative_draft_model
        self._draft_model = None if draft is None else DraftModel(draft, model, context)
        self._goodput = goodput if context.config.num_speculative_tokens else None
        self._accepted = 0
        self.draft_tokens_total = 0
        self.accepted_draft_tokens_total = 0

    def propose(self, slices: list[SequenceSlice]) -> list[SequenceSlice]:
        """The slices with the drafts of the draft model, if there is one. Call it for every pass, before the pass."""
        if self._draft_model is None:
            return slices
        return self._draft_model.propose(slices, computes_prompts=self._goodput is None or self._goodput.is_expected)

    def note_drafts(self, part: SequenceSlice, accepted: int) -> None:
        """Note how many drafts of a slice were the sampled tokens."""
        count = len(part.drafts)
        assert part.sequence.draft_length is not None, "it has drafted"
        part.sequence.draft_length.note(count, accepted)
        if self._goodput is not None:
            self._goodput.note_drafts(count, accepted)
        self._accepted += accepted
        self.draft_tokens_total += count
        self.accepted_draft_tokens_total += accepted

    def note_pass(self, slices: Slices[SequenceSlice], seconds: float) -> None:
        """Note the time of a pass, after the drafts of its slices."""
        if self._goodput is None:
            return
        self._goodput.note_pass(
            rows=sum(part.length for part in slices),
            sampled=sum(part.samples for part in slices),
            drafts=sum(len(part.drafts) for part in slices),
            accepted=self._accepted,
            seconds=seconds if all(part.length == 1 for part in slices) else None,
            rounds=[] if self._draft_model is None else self._draft_model.rounds,
        )
        self._accepted = 0

"""Speculation with a draft model: a small model proposes the next tokens, which a pass of the served one verifies."""

from __future__ import annotations

from collections.abc import Sequence as Slices
from dataclasses import replace

import msgpack
import torch

from megatron_runtime.config import SAME_VOCABULARY
from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.draft_coverage import DraftCoverage
from megatron_runtime.engine.sampling.sampler import NO_TOKEN, make_sampler
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.shared_output import schedule_checksum
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.recurrent_config import NO_DRAFTS

_Drafts = list[list[int]]
"""The drafts of each slice, possibly none."""
_Rounds = list[tuple[int, float]]
"""Rows and seconds of passes of the draft model."""


class DraftModel:
    """Drafts tokens with another model (speculative decoding, Leviathan et al. 2023), sampled with the noise, the
    penalties and the grammar of the request, so that drafts of sampled answers are accepted as often.

    The keys and values of the draft model are in the same blocks as those of the served model, in a cache of its own.
    It computes prompts in the same passes, if drafts are expected to be worth it, but in decode passes only the
    requests that have drafts, with the tokens that it has not computed before. So a request without drafts, or one
    whose drafts are wrong, costs little.

    Of several ranks, the one that samples drafts and sends the drafts to the others.

    Args:
        draft: The draft model, whole on this rank.
        model: The served model.
        context: Has the tables of blocks and the cache of the draft model.

    Raises:
        ConfigurationError: The models do not fit together; it names the field, the value and the remedy.
    """

    def __init__(self, draft: Decoder, model: Decoder, context: DynamicInferenceContext) -> None:
        _check(draft, model, context)
        assert context.draft_cache is not None, "the context has allocated it"
        self._draft = draft
        self._ranks = model.ranks
        self._context = context
        self._cache = context.draft_cache
        self._coverage = DraftCoverage(self._cache.num_blocks, self._cache.block_size_tokens)
        self.rounds: _Rounds = []
        """Those of the last pass with drafts, equal on all ranks; none if it had no drafts."""

    def propose(self, slices: list[SequenceSlice], *, computes_prompts: bool = True) -> list[SequenceSlice]:
        """The slices with up to ``max_drafts`` drafts each. Call it for every pass, before the pass.

        Args:
            slices: Of the pass.
            computes_prompts: Whether prompts are computed now, or only with the first draft behind them.

        Raises:
            LockStepError: Another rank has another schedule.
            LostRankError: The drafts do not arrive from the rank that samples.
        """
        self.rounds = []
        drafts: _Drafts = [[] for _ in slices]
        if self._ranks.position.samples:
            drafts = self._draft_here(slices, computes_prompts=computes_prompts)
        if any(part.max_drafts for part in slices):
            drafts, self.rounds = self._shared(slices, drafts)
        else:
            self.rounds = []  # They are not shared.
        return [part._replace(drafts=tuple(each)) for part, each in zip(slices, drafts, strict=True)]

    def _shared(self, slices: Slices[SequenceSlice], drafts: _Drafts) -> tuple[_Drafts, _Rounds]:
        """The drafts and rounds of the rank that samples."""
        position = self._ranks.position
        if position.sizes.ranks_per_replica_group == 1:
            return drafts, self.rounds
        outcome = msgpack.packb((drafts, self.rounds)) if position.samples else None
        arriving = self._ranks.share_outcome(outcome, checksum=schedule_checksum(slices))
        shared: tuple[_Drafts, _Rounds] = msgpack.unpackb(arriving.wait())
        return shared

    @torch.inference_mode()
    def _draft_here(self, slices: Slices[SequenceSlice], *, computes_prompts: bool) -> _Drafts:
        drafts: _Drafts = [[] for _ in slices]
        for part in slices:
            self._coverage.replaced(part.sequence, part.start, part.end)
        due = self._due(slices, computes_prompts=computes_prompts)
        active = [index for index, part in due.items() if part.samples]
        try:
            sampled = self._run(list(due.values()))
            while active:
                for index, token in zip(active, sampled, strict=True):
                    if token != NO_TOKEN:
                        drafts[index].append(token)
                        slices[index].sequence.tokens.append(token)
                        slices[index].sequence.num_drafts += 1
                active = [
                    index
                    for index, token in zip(active, sampled, strict=True)
                    if token != NO_TOKEN and len(drafts[index]) < slices[index].max_drafts
                ]
                sampled = self._run([_last_token(slices[index]) for index in active])
        finally:
            for part, drafted in zip(slices, drafts, strict=True):
                del part.sequence.tokens[len(part.sequence.tokens) - len(drafted) :]
                part.sequence.num_drafts = 0
        for index, part in due.items():
            # No pass has computed the last draft, only sampled it.
            self._coverage.computed(part.sequence, part.start, part.end + max(len(drafts[index]) - 1, 0))
        return drafts

    def _due(self, slices: Slices[SequenceSlice], *, computes_prompts: bool) -> dict[int, SequenceSlice]:
        """The tokens to compute, by the index of the slice: of prompts, and of requests with drafts.

        They begin with those that are missing before the slice. Where too many are missing for one pass, some of them
        are computed now, and the request has no drafts in this pass.
        """
        room = self._context.max_tokens - sum(part.length for part in slices)
        due = {}
        for index, part in enumerate(slices):
            if not part.max_drafts and (part.length == 1 or not computes_prompts):
                continue
            start = self._coverage.end(part.sequence, part.start)
            missing = part.start - start
            if missing <= room:
                due[index] = part._replace(start=start, samples=part.max_drafts > 0, num_log_probs=0)
            elif room > 0:
                due[index] = part._replace(start=start, end=start + room, samples=False, num_log_probs=0)
            room -= min(missing, room)
        return due

    def _run(self, rows: list[SequenceSlice]) -> list[int]:
        """The tokens sampled after those of the slices that sample."""
        if not rows:
            return []
        started = self._context.clock()
        tokens = self._sampled(rows)
        self.rounds.append((sum(part.length for part in rows), self._context.clock() - started))
        return tokens

    def _sampled(self, rows: list[SequenceSlice]) -> list[int]:
        logits = self._draft(replace(self._context.forward_batch(rows), adapters=None), self._cache)
        if not any(part.samples for part in rows):
            return []
        assert logits is not None, "the draft model is whole"
        rules = self._context.sampling_rules(rows)
        sampler = make_sampler(rules, logits.shape[1], logits.device)
        if rules.changes_logits:
            sampler.edit_(logits)
        tokens: list[int] = sampler.sample(logits).tolist()
        return tokens


def _last_token(part: SequenceSlice) -> SequenceSlice:
    """The last draft."""
    end = len(part.sequence.tokens)
    return part._replace(start=end - 1, end=end, samples=True, num_log_probs=0)


def _check(draft: Decoder, model: Decoder, context: DynamicInferenceContext) -> None:
    sizes = model.ranks.position.sizes
    reason = None
    if draft.config.recurrent is not None:
        reason = f"{draft.config.architecture} {NO_DRAFTS}; give a model with attention alone"
    elif (ours := model.config.vocab_size) != (theirs := draft.config.vocab_size):
        reason = f"its vocabulary has {theirs} tokens, but that of the served model {ours}; {SAME_VOCABULARY}"
    elif draft.config.max_position_embeddings < context.max_sequence_length:
        reason = (
            f"it takes {draft.config.max_position_embeddings} tokens, but a sequence may have "
            f"{context.max_sequence_length}; lower max_sequence_length, or use another draft model"
        )
    elif sizes.pipeline > 1:
        reason = (
            f"not supported with pipeline parallelism ({sizes.pipeline} stages), whose passes overlap; use tensor "
            "parallelism, or speculation by prompt lookup"
        )
    elif draft.ranks.position.sizes.ranks_per_replica_group > 1:
        reason = "it is divided among ranks; load it without ranks, so that each rank has the whole one"
    elif draft.device != model.device:
        reason = f"it is on {draft.device}, but the served model on {model.device}; load both on the same device"
    if reason is not None:
        raise ConfigurationError(f"speculative_draft_model: {reason}", field="speculative_draft_model")

"""Runs one pass through the model and samples the next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_runtime.engine.context import LogProbRows
from megatron_runtime.engine.inference_wrapper import GPTInferenceWrapper
from megatron_runtime.engine.packed_arrays import on_host
from megatron_runtime.engine.pass_graphs import CapturedPass
from megatron_runtime.engine.sampling.log_probs import LogProbs, log_probs
from megatron_runtime.engine.sampling.sampler import TokenSampler, make_sampler
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.tracked_request import Scores
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.hidden_pool import HiddenPool
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.sampling_params import SamplingParams, token_key


@dataclass(frozen=True)
class StepOutput:
    """The output of a pass, on the host."""

    tokens: list[int]
    """[S], one per sampled row; NO_TOKEN where the logits were not finite."""
    log_probs: LogProbs | None
    """Of the positions in LogProbRows."""
    dead_ends: dict[int, str] = field(default_factory=dict)
    """Why there is NO_TOKEN, for rows whose grammar has no valid continuation; by their index in ``tokens``."""
    pooled: list[list[float]] = field(default_factory=list)
    """Sums of hidden states, [hidden size] for each slice that pools any."""
    mask_milliseconds: Mapping[int, int] = field(default_factory=dict)
    """How long the masks of grammars took, for rows with at least one; by their index in ``tokens``."""
    seconds: float | None = None
    """Time of the pass, if the rank that samples has measured it before it shares the output."""


class TextGenerationController:
    """A model and its tokenizer, as the engine uses them."""

    def __init__(self, inference_wrapped_model: GPTInferenceWrapper | Decoder | nn.Module, tokenizer: Any) -> None:
        if not isinstance(inference_wrapped_model, GPTInferenceWrapper):
            inference_wrapped_model = GPTInferenceWrapper(inference_wrapped_model)
        self.inference_wrapped_model = inference_wrapped_model
        self.model, self.tokenizer = inference_wrapped_model.served(tokenizer)
        self._token_text = lru_cache(maxsize=65536)(self._detokenize_one)

    @torch.inference_mode()
    def run(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        rules: SamplingRules,
        sampled_rows: Tensor | None,
        wanted: LogProbRows | None,
        tape: RoutingTape | None = None,
        pool: HiddenPool | None = None,
    ) -> StepOutput:
        """Compute the batch and sample; for the rank of a replica group that samples.

        Args:
            batch: The batch.
            kv_cache: The KV cache that the batch's tables refer to.
            rules: One per sampled row.
            sampled_rows: int64 [S], rows of the logits to sample; None means all.
            wanted: Log probabilities to report.
            tape: The routing of the pass, if it is recorded or replayed.
            pool: The hidden states to pool.
        """
        logits: Tensor | None = self.model(batch, kv_cache, tape, pool)
        assert logits is not None, "this rank samples"
        sampled = logits if sampled_rows is None else logits[sampled_rows]
        sampler = make_sampler(rules, sampled.shape[1], sampled.device)
        output = self._sample(logits, sampled, sampler, rules, wanted)
        return output if pool is None else replace(output, pooled=pool.sums())

    @torch.inference_mode()
    def run_captured(self, begun: CapturedPass, rules: SamplingRules, wanted: LogProbRows | None) -> StepOutput:
        """The same for a pass that a CUDA graph has begun, each of whose rows of logits is sampled."""
        return self._sample(begun.logits, begun.logits, begun, rules, wanted)

    def _sample(
        self, logits: Tensor, sampled: Tensor, sampler: TokenSampler, rules: SamplingRules, wanted: LogProbRows | None
    ) -> StepOutput:
        """Sample the rows ``sampled``, which may be the logits themselves; they are edited in place."""
        if rules.changes_logits:
            # Log probabilities are those of the model.
            logits = logits.clone() if wanted is not None and sampled is logits else logits
            sampler.edit_(sampled)
        tokens = sampler.sample(sampled)
        self.model.ranks.await_device()
        scores = None
        if wanted is not None:
            chosen, ids, values = _log_probs(logits, tokens, wanted)
            tokens, ids, chosen, values = on_host(tokens, ids, chosen, values)
            scores = LogProbs.from_arrays(chosen, ids, values)
        return StepOutput(tokens.tolist(), scores, mask_milliseconds=rules.mask_milliseconds)

    def scores(self, log_probs: LogProbs | None, start: int, count: int, params: SamplingParams) -> Scores:
        """Log probabilities of some positions, each with the most likely tokens as the parameters ask for.

        Several tokens can have the same text, mainly those that are no whole character: the most likely one has the
        text as its key, the others ``token_id:N``.
        """
        if log_probs is None:
            return []
        top_n, by_key = params.top_n_logprobs, _by_id if params.return_tokens_as_token_ids else self._by_text
        return [
            (log_probs.chosen[i], by_key(log_probs.top_ids[i][:top_n], log_probs.top_values[i][:top_n]))
            for i in range(start, start + count)
        ]

    def _by_text(self, token_ids: list[int], values: list[float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, value in zip(token_ids, values, strict=True):
            text = self._token_text(token_id)
            named[text if text not in named else token_key(token_id)] = value
        return named

    def _detokenize_one(self, token_id: int) -> str:
        return self.tokenizer.detokenize([token_id], skip_special_tokens=False)


def _by_id(token_ids: list[int], values: list[float]) -> dict[str, float]:
    return dict(zip(map(token_key, token_ids), values, strict=True))


def _log_probs(logits: Tensor, tokens: Tensor, wanted: LogProbRows) -> tuple[Tensor, Tensor, Tensor]:
    targets = wanted.targets
    if tokens.numel():
        targets = torch.where(wanted.sampled >= 0, tokens[wanted.sampled.clamp(min=0)], targets)
    normalized = logits[wanted.rows].log_softmax(dim=-1)
    if wanted.drawn is not None and wanted.rules is not None:
        drawn = logits[wanted.rows[wanted.drawn]]
        sampler = make_sampler(wanted.rules, drawn.shape[1], drawn.device)
        sampler.edit_(drawn)
        normalized[wanted.drawn] = sampler.processed_log_probs(drawn)
    return log_probs(normalized, targets.clamp(min=0), wanted.top_n)

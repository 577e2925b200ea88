"""Validates a request and turns it into a sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.context_limits import ContextLimits
from megatron_runtime.engine.engine_adapters import EngineAdapters
from megatron_runtime.engine.routing_store import ExpertRouting
from megatron_runtime.engine.sampling.compiled_grammars import compiled_grammars
from megatron_runtime.engine.scheduling.draft_length import DraftLength
from megatron_runtime.engine.scheduling.prompt_lookup import PromptLookup
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.errors import (
    BlockOverflowError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    TokenOverflowError,
)
from megatron_runtime.inference_request import DynamicInferenceRequest, compute_block_hashes
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)

Prompt = str | list[int] | Tensor


class Admission:
    """The conditions that a request has to meet before it is queued.

    Args:
        tokenizer: Tokenizes text prompts.
        limits: Limits of the context.
        vocab_size: Token ids are less than this number.
        chunked_prefill: Whether a prompt may be longer than one pass.
        prefix_caching: Whether requests get block hashes, which identify cached prefixes.
        scores_prompts: Whether requests may have log probabilities of their prompts.
        routing: Parses the routing that a request replays.
        num_speculative_tokens: Most drafts of a request in a pass; 0: none.
        has_draft_model: Whether a draft model proposes them, instead of prompt lookup.
        adapters: The adapters that requests can name.
        grammar_cache_bytes: Most memory of compiled grammars that are kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ContextLimits,
        *,
        vocab_size: int,
        chunked_prefill: bool,
        prefix_caching: bool = False,
        scores_prompts: bool = True,
        routing: ExpertRouting | None = None,
        num_speculative_tokens: int = 0,
        has_draft_model: bool = False,
        adapters: EngineAdapters | None = None,
        grammar_cache_bytes: int = InferenceConfig.grammar_cache_bytes,
    ) -> None:
        compiled_grammars(tokenizer).max_bytes = grammar_cache_bytes
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._chunked_prefill = chunked_prefill
        self._prefix_caching = prefix_caching
        self._scores_prompts = scores_prompts
        self._routing = routing
        self._num_speculative_tokens = num_speculative_tokens
        self._has_draft_model = has_draft_model
        self._adapters = adapters

    def admit(self, request: DynamicInferenceRequest, prompt: Prompt, generated: Tokens[int]) -> Sequence:
        """Set the request's tokens and limits, and return its sequence.

        Raises:
            InvalidRequestError: The prompt, the parameters or the generated tokens are invalid.
            ContextOverflowError: The request can never fit; the subclass names the limit.
        """
        params = request.sampling_params
        assert params is not None
        self._check_parameters(params)
        tokens = self._prompt_tokens(prompt, params)
        request.prompt_tokens = request.remaining_prompt_tokens = torch.tensor(tokens, dtype=torch.int64)
        request.prompt_length = len(tokens)
        generated_tokens = self._checked("generated", generated)
        if not tokens:
            raise InvalidRequestError("prompt is empty; give at least one token", field="prompt")
        limit = self._tokens_to_generate(request.request_id, len(tokens), params)
        if params.num_tokens_total is None:
            params.num_tokens_to_generate = limit
            params.min_tokens = min(params.min_tokens, limit)
        if len(generated_tokens) > limit:
            raise InvalidRequestError(
                f"generated has {len(generated_tokens)} tokens, more than the {limit} to generate", field="generated"
            )
        self._require_room(request.request_id, len(tokens), limit)
        adapter = None if self._adapters is None else self._adapters.find(params.adapter)
        request.adapter_digest = None if adapter is None else adapter.digest
        replayed = None if self._routing is None else self._routing.parse(params.replayed_routing)
        # Other requests must not reuse the keys and values of a replayed routing.
        salts = params.cache_salt, request.adapter_digest
        hashes = self._block_hashes(tokens + generated_tokens, *salts) if replayed is None else []
        request.enable_prefix_caching = request.enable_prefix_caching and replayed is None
        request.precomputed_block_hashes = hashes[: len(tokens) // self._limits.block_size_tokens]
        return Sequence(
            request_id=request.request_id,
            tokens=tokens + generated_tokens,
            prompt_length=len(tokens),
            max_length=len(tokens) + limit,
            priority=params.priority,
            tenant=params.tenant or "",
            body=params.body,
            answers=params.answers,
            next_log_prob=_first_log_prob(params, len(tokens), limit),
            block_hashes=hashes,
            pooling=params.pooling,
            adapter=None if adapter is None else adapter.slot,
            replayed_routing=replayed,
            draft_length=self._draft_length(params) if replayed is None else None,
        )

    def _draft_length(self, params: SamplingParams) -> DraftLength | None:
        if not self._num_speculative_tokens or _follows_tokens(params):
            return None
        return (DraftLength if self._has_draft_model else PromptLookup)(self._num_speculative_tokens)

    def _require_known(self, field: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"{field}: {token} is not a token id; the model has 0 to {self._vocab_size - 1}", field=field
                )

    def _block_hashes(self, tokens: list[int], salt: str | None, adapter: str | None) -> list[int]:
        if not self._prefix_caching:
            return []
        return compute_block_hashes(tokens, self._limits.block_size_tokens, salt, adapter)

    def _check_parameters(self, params: SamplingParams) -> None:
        if params.n != 1:
            raise InvalidRequestError(
                f"n={params.n}: a request has one answer; submit one for each of SamplingParams.samples()", field="n"
            )
        if params.return_log_probs and not params.skip_prompt_log_probs and not self._scores_prompts:
            raise InvalidRequestError(
                "skip_prompt_log_probs=False: the engine was configured with materialize_only_last_token_logits, and "
                "has no logits of prompts; set skip_prompt_log_probs",
                field="skip_prompt_log_probs",
            )
        self._require_known("logit_bias", params.logit_bias or ())
        self._require_known("allowed_token_ids", params.allowed_token_ids or ())
        if params.grammar is not None:
            compiled_grammars(self._tokenizer).check(params.grammar)

    def _prompt_tokens(self, prompt: Any, params: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            try:
                tokens = self._tokenizer.tokenize(prompt)
            except Exception as error:
                raise InvalidRequestError(f"prompt can't be tokenized: {error}", field="prompt") from error
            starts = [self._tokenizer.bos] if params.add_BOS and self._tokenizer.bos is not None else []
            # A tokenizer may have more tokens than the embedding, which would end the step of all requests.
            return self._checked("prompt", starts + list(tokens))
        if isinstance(prompt, Tensor):
            prompt = prompt.flatten().tolist()
        return self._checked("prompt", prompt)

    def _checked(self, field: str, tokens: Any) -> list[int]:
        if not isinstance(tokens, (list, tuple)):
            raise InvalidRequestError(f"{field} must be text or token ids, not {type(tokens).__name__}", field=field)
        for index, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"{field}[{index}]={token!r} is not a token id; the model has 0 to {self._vocab_size - 1}",
                    field=field,
                )
        return list(tokens)

    def _tokens_to_generate(self, request_id: int, prompt_length: int, params: SamplingParams) -> int:
        longest = self._limits.max_sequence_length
        count = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            count = params.num_tokens_total - prompt_length
            if count < 0:
                raise InvalidRequestError(
                    f"num_tokens_total={params.num_tokens_total} is less than the prompt's {prompt_length} tokens",
                    field="num_tokens_total",
                )
        if prompt_length > longest or (prompt_length == longest and count != 0):
            raise MaxSequenceLengthOverflowError(
                request_id,
                f"the prompt has {prompt_length} tokens and leaves no room for an answer within "
                f"max_sequence_length={longest}; shorten the prompt",
            )
        room = longest - prompt_length
        if count is None:
            return max(1, min(room, self._pool_tokens + 1 - prompt_length))
        if count > room:
            _logger.warning(
                "request %d: %d tokens to generate reduced to %d by max_sequence_length=%d",
                request_id, count, room, longest,
            )  # fmt: skip
        return min(count, room)

    def _require_room(self, request_id: int, prompt_length: int, limit: int) -> None:
        if prompt_length > self._limits.max_tokens and not self._chunked_prefill:
            raise TokenOverflowError(
                request_id,
                f"the prompt has {prompt_length} tokens, but a pass takes max_tokens={self._limits.max_tokens}; "
                "shorten the prompt or serve with enable_chunked_prefill",
                is_transient=False,
            )
        if prompt_length + max(0, limit - 1) > self._pool_tokens:
            raise BlockOverflowError(
                request_id,
                f"the prompt's {prompt_length} tokens and {limit} to generate exceed the KV cache's "
                f"{self._pool_tokens} tokens; request fewer tokens or serve with more kv_cache_memory_bytes",
                is_transient=False,
            )

    @property
    def _pool_tokens(self) -> int:
        return self._limits.num_blocks * self._limits.block_size_tokens


def _follows_tokens(params: SamplingParams) -> bool:
    """Whether the request needs more of a pass than the sampled tokens, or a state of the tokens so far, which wrong
    drafts would spoil."""
    return params.return_log_probs or params.pooling is not None or params.thinking_token_budget is not None


def _first_log_prob(params: SamplingParams, prompt_length: int, limit: int) -> int | None:
    """Index of the first token whose log probability is reported; the first token of a prompt has none."""
    if not params.return_log_probs:
        return None
    if not params.skip_prompt_log_probs and prompt_length > 1:
        return 1
    return prompt_length if limit > 0 else None

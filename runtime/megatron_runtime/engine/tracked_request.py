"""The state of one request in the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from functools import cached_property
from typing import Literal

from torch import Tensor

from megatron_runtime.engine.pooled_states import PooledStates
from megatron_runtime.engine.request_future import RequestFuture, resolve
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice
from megatron_runtime.engine.shared_values import SharedValues
from megatron_runtime.engine.step_result import PartialOutput
from megatron_runtime.engine.stop_matcher import StopMatcher
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Scores = Sequences[tuple[float, dict[str, float]]]
"""Log probabilities of consecutive tokens, each with the most likely tokens of its position by their text."""
_GENERATING = Status.ACTIVE_AND_GENERATING_TOKENS


class TrackedRequest:
    """A request's record, with the state of its generation.

    Args:
        record: Has one request with complete parameters.
        tokenizer: Detokenizes the answer.
        future: Resolved when the request ends.
        deadline: On the monotonic clock, or None.
    """

    def __init__(
        self,
        record: DynamicInferenceRequestRecord,
        tokenizer: Tokenizer,
        future: RequestFuture,
        *,
        deadline: float | None = None,
    ) -> None:
        params = record[0].sampling_params
        assert params is not None
        self.record = record
        self.request_id = record.request_id
        self.params: SamplingParams = params
        self.future = future
        self.deadline = deadline
        self.sequence: Sequence | None = None
        self.was_scheduled = False
        self.routing: Tensor | None = None
        """int32 [computed tokens, layers with experts, experts per token] of a request that ends, if it is recorded."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.incremental(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_words) if params.stop_words else None
        self.stop_ids = _stop_ids(params, tokenizer)
        self.bad_sequences = _bad_sequences(tuple(params.bad_words or ()), tokenizer)
        self.pooled: PooledStates | None = None
        """The hidden states of a request for an embedding; created with its sequence."""
        self.generated: list[int] = []
        """The generated tokens of all segments."""
        self._log_probs: list[float] = []
        self._top_n: list[dict[str, float]] = []
        self._num_emitted = 0
        self._terminated = False
        self._first_token_time: float | None = None

    @cached_property
    def guide(self) -> RequestGuide | None:
        """The guide of the request's grammar, if it has one; needs the sequence."""
        if self.params.grammar is None:
            return None
        assert self.sequence is not None
        return RequestGuide(self.params.grammar, self._tokenizer, self.sequence.prompt_length)

    @cached_property
    def thinking(self) -> ThinkingLimit | None:
        """The limit of the request's reasoning, if it has one; needs the sequence."""
        budget = self.params.thinking_token_budget
        if budget is None:
            return None
        assert self.sequence is not None
        begin, end = self.params.thinking_begin, self.params.thinking_end
        return ThinkingLimit(self._tokenizer, self.sequence.prompt_length, budget=budget, begin=begin, end=end)

    @property
    def current(self) -> DynamicInferenceRequest:
        """The current segment."""
        return self.record.requests[-1]

    def begin(self, sequence: Sequence) -> FinishReason | None:
        """Start with a sequence, which may have generated tokens. Returns the finish reason if these end it."""
        self.sequence = sequence
        if self.params.pooling is not None:
            self.pooled = PooledStates(self.params.pooling, sequence.prompt_length)
            return None
        generated = sequence.tokens[sequence.prompt_length :]
        self._num_emitted = len(generated)
        for token in generated:
            self.generated.append(token)
            self.current.generated_tokens.append(token)
            if reason := self._reason_to_end(token):
                return reason
        if len(sequence.tokens) >= sequence.max_length and sequence.next_log_prob is None:
            return "length"
        return None

    def settle(self, part: SequenceSlice, token: int | None, log_probs: Scores) -> FinishReason | None:
        """Apply the output of a pass for the request's slice.

        Args:
            part: The computed slice.
            token: The sampled token, if the slice samples.
            log_probs: Log probabilities of the next tokens without one, with the most likely tokens.

        Returns:
            The reason if the request has ended.
        """
        sequence, request = part.sequence, self.record.requests[-1]
        # Where tokens are generated, the whole prompt was computed by an earlier pass.
        if token is None or request.status is not _GENERATING:
            self._note_progress(part.end, samples=token is not None)
        reason: FinishReason | None = None
        room = sequence.max_length - len(sequence.tokens)
        if token is not None and room <= 0:
            # The pass only computed log probabilities: the sampled token is dropped.
            reason, log_probs = "length" if self.pooled is None else "stop", log_probs[:-1]
        elif token is not None:
            if self._first_token_time is None:
                self._first_token_time = time.time()
            sequence.tokens.append(token)
            self.generated.append(token)
            request.generated_tokens.append(token)
            if token in self.stop_ids or self._matcher is not None:
                reason = self._reason_to_end(token)
            if reason is None and room == 1:
                reason = "length"
        for value, top_n in log_probs:
            self._add_log_prob(value, top_n)
        return reason

    def enter_context(self, epoch: int | None = None) -> None:
        """The request starts to run, for the first time or again, in this generation epoch."""
        assert self.sequence is not None
        if not self.was_scheduled:
            self.record[0].num_cached_tokens = min(self.sequence.num_cached, self.sequence.prompt_length)
        self.was_scheduled = True
        if epoch is not None and self.current.kv_cache_epoch is None:
            self.current.kv_cache_epoch = [(0, epoch)]
        self.current.add_event_add_context()

    def note_time_per_token(self, seconds: float) -> None:
        """Append to ``tpot`` of the current segment; the record's first segment needs a list too."""
        for segment in (self.record[0], self.current):
            segment.tpot = [] if segment.tpot is None else segment.tpot
        _append(self.current.tpot, seconds)

    def pause(self, *, notes_event: bool) -> None:
        """The request waits for a further block and keeps its cache."""
        self.current.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
        if notes_event:
            self.current.add_event_pause()

    def evict(self) -> None:
        """The request lost its cache: its tokens so far become the prompt of its next segment."""
        request = self.current
        request.add_event_evict()
        if self.pooled is not None:
            self.pooled.reset()
        request.status = Status.WAITING_IN_QUEUE
        request.finished_chunk_token_count = 0
        request.remaining_prompt_tokens = request.prompt_tokens
        if request.generated_tokens:
            self.record.checkpoint()
            assert self.sequence is not None
            self.sequence.block_hashes = list(self.current.precomputed_block_hashes)
        else:
            request.kv_cache_staleness = request.kv_cache_epoch = None

    def pop_partial(self, *, final: bool = False) -> PartialOutput | None:
        """The new tokens of a streaming request, if there are enough."""
        params = self.params
        if not params.streaming:
            return None
        start, end = self._num_emitted, len(self.generated) - self._terminated
        if self._matcher is not None and not final:
            end = max(start, self._matcher.safe_tokens())
        if end - start < (1 if final else params.streaming_interval):
            return None
        self._num_emitted = end
        log_probs = self._log_probs[start:end] if params.return_log_probs else None
        top_n = self._top_n[start:end] if params.top_n_logprobs else None
        # In half of the time that the constructor of a NamedTuple takes.
        return tuple.__new__(PartialOutput, (self.request_id, self.generated[start:end], log_probs, top_n))

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Close the record: text, status, times and events."""
        request = self.current
        text = self._final_text()
        for segment in self.record.requests:
            segment.generated_text = ""
            segment.generated_length = len(segment.generated_tokens)
            segment.finish_reason = reason
        request.generated_text = text
        request.stop_reason = self._stop_reason() if reason == "stop" else None
        if self.routing is not None and len(self.routing) >= request.total_tokens - 1:
            request.routing_indices = self.routing[: request.total_tokens - 1]
        if error is not None:
            request.add_event_error_nontransient(error)
        completed = reason in ("stop", "length")
        if completed and self.pooled is not None:
            self.record[0].embedding = self.pooled.embedding()
        request.status = Status.COMPLETED if completed else Status.FAILED
        request.add_event_finish() if completed else request.add_event_fail()
        self._close_times()

    def resolve(self) -> None:
        """Resolve the future."""
        resolve(self.future, self.record)

    def _add_log_prob(self, value: float, top_n: dict[str, float]) -> None:
        """Append the log probability of the next token without one, of the prompt or of the answer."""
        assert self.sequence is not None
        assert self.sequence.next_log_prob is not None
        if self.sequence.next_log_prob < self.sequence.prompt_length:
            _append(self.record[0].prompt_log_probs, value)
            _append(self.record[0].prompt_top_n_logprobs, top_n)
        else:
            self._log_probs.append(value)
            self._top_n.append(top_n)
            _append(self.current.generated_log_probs, value)
            _append(self.current.generated_top_n_logprobs, top_n)
        self.sequence.next_log_prob += 1

    def _note_progress(self, num_computed: int, *, samples: bool) -> None:
        """Record how much of the prompt is computed."""
        request = self.current
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS if samples else Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
        assert request.prompt_tokens is not None
        if request.remaining_prompt_length:
            request.finished_chunk_token_count = min(num_computed, request.prompt_tokens.numel())
            request.remaining_prompt_tokens = request.prompt_tokens[num_computed:]

    def _reason_to_end(self, token: int) -> FinishReason | None:
        """Whether a token, the last one, ends the answer."""
        may_end = len(self.generated) > self.params.min_tokens
        if may_end and token in self.stop_ids:
            self._terminated = True
            return "stop"
        if self._matcher is None:
            return None
        text = self._detokenizer.push([token])
        return "stop" if self._matcher.push(text, may_match=may_end) else None

    def _final_text(self) -> str:
        """The text of the answer; tokens after a stop string are removed."""
        keeps_stop = self.params.detokenize_stop_sequence
        if self._matcher is not None and self._matcher.match is not None:
            start, end = self._matcher.match
            if keeps_stop:
                return self._matcher.text[:end]
            self._keep_tokens(max(self._num_emitted, self._matcher.tokens_before(start)))
            return self._matcher.text[:start]
        hidden = int(self._terminated and not keeps_stop)
        return self._tokenizer.detokenize(
            self.generated[: len(self.generated) - hidden], skip_special_tokens=self.params.skip_special_tokens
        )

    def _stop_reason(self) -> int | str | None:
        if self._matcher is not None and self._matcher.match is not None:
            start, end = self._matcher.match
            return self._matcher.text[start:end]
        if not self.generated:
            return None
        last = self.generated[-1]
        is_requested = last in (self.params.stop_token_ids or ())
        is_own_end = not self.params.ignore_eos and last in self._tokenizer.eos_token_ids
        return last if self._terminated and is_requested and not is_own_end else None

    def _keep_tokens(self, count: int) -> None:
        excess = len(self.generated) - count
        if excess == 0:
            return
        for values in (self.generated, self._log_probs, self._top_n):
            del values[count:]
        for name in ("generated_tokens", "generated_log_probs", "generated_top_n_logprobs"):
            left = excess
            for segment in reversed(self.record.requests):
                values = getattr(segment, name) or []
                cut = min(left, len(values))
                del values[len(values) - cut :]
                left -= cut

    def _close_times(self) -> None:
        now = time.time()
        added = self.record[0].event_add_engine
        submitted = added.timestamp if added is not None and added.timestamp is not None else now
        self.record.latency = now - submitted
        if self._first_token_time is None:
            return
        self.record[0].ttft = self._first_token_time - submitted
        if len(self.generated) > 1 and self.record[0].tpot is None:
            self.note_time_per_token((now - self._first_token_time) / (len(self.generated) - 1))


def _append(values: object, value: object) -> None:
    if isinstance(values, list):
        values.append(value)


def _stop_ids(params: SamplingParams, tokenizer: Tokenizer) -> frozenset[int]:
    wanted = frozenset(params.stop_token_ids or ())
    if params.ignore_eos:
        return wanted
    if params.termination_id is not None:
        return wanted | {params.termination_id}
    return wanted | tokenizer.eos_token_ids


def _tokens_of_bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> frozenset[tuple[int, ...]]:
    """The tokens of each bad word at the start of a text and after a space, as in vLLM."""
    texts = {start + word.lstrip() for word in words for start in ("", " ")}
    return frozenset(tuple(tokenizer.tokenize(text)) for text in texts)


_bad_sequences = SharedValues(_tokens_of_bad_words)

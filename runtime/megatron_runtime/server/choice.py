"""One choice of an answer: from a tokenized prompt to text, piece by piece or at once."""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_runtime.errors import ContextOverflowError, InvalidRequestError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.errors import ApiError, unavailable
from megatron_runtime.server.metrics import ChoiceTimer, FrontendMetrics

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest

RETRY_AFTER_ABORT = 5


@dataclass(frozen=True)
class TokenLogProb:
    """A generated token with its log probability, and those of the likeliest tokens in its place by their text."""

    token: int
    log_prob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Delta:
    """New text of one choice. The last one of a choice has a finish reason and the numbers of tokens."""

    choice: int
    text: str
    log_probs: tuple[TokenLogProb, ...] = ()
    tokens: tuple[int, ...] = ()
    """The tokens that this text came from, but never half of what begins a character."""
    prompt_log_probs: tuple[TokenLogProb, ...] = ()
    """Of the prompt's tokens from the second on, if they are asked for: with the first delta, be it the last one."""
    finish_reason: str | None = None
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that were not computed."""
    weight_version: int = 0
    """Of the weights with which a choice that has ended was made."""


@dataclass(frozen=True)
class ChoiceTask:
    """What to generate for one choice."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    uuid: bytes | None = None
    """Its name towards the coordinator, if the client may send it again under the same one."""
    with_every_token: bool = False
    """Log probabilities count the token that ended the answer too, so that there is one for each token."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the text has nevertheless."""


class ChoiceRunner:
    """Runs choices; closing or cancelling one aborts its request in the engine."""

    def __init__(self, client: InferenceClient, tokenizer: Tokenizer, metrics: FrontendMetrics) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(self, task: ChoiceTask) -> AsyncGenerator[Delta, None]:
        """The deltas of a choice; with ``params.streaming`` as they come, else a single one."""
        with ChoiceTimer(self._metrics, len(task.prompt)) as timer:
            async with aclosing(self._deltas(task, timer)) as deltas:
                async for delta in deltas:
                    yield delta

    def _deltas(self, task: ChoiceTask, timer: ChoiceTimer) -> AsyncGenerator[Delta, None]:
        if not task.params.streaming:
            return self._at_once(task, timer)
        has_scored_prompt = task.params.return_log_probs and not task.params.skip_prompt_log_probs
        return self._scored_stream(task, timer) if has_scored_prompt else self._stream(task, timer)

    async def _scored_stream(self, task: ChoiceTask, timer: ChoiceTimer) -> AsyncGenerator[Delta, None]:
        """A stream that begins with the log probabilities of the prompt.

        An engine tells those with the end of a request: they are had from one that only scores the prompt, and what
        it computed is in the prefix cache for the other.
        """
        scoring, going_on = copy.deepcopy(task.params), copy.deepcopy(task.params)
        scoring.add_attributes({"num_tokens_to_generate": 0, "min_tokens": 0, "grammar": None, "streaming": False})
        going_on.add_attributes({"skip_prompt_log_probs": True})
        name = None if task.uuid is None else uuid.uuid5(uuid.UUID(bytes=task.uuid), "prompt").bytes
        record = await self._client.add_request(list(task.prompt), scoring, request_uuid=name)
        request: DynamicInferenceRequest = record[-1]
        _raise_if_failed(request)
        yield Delta(task.index, "", prompt_log_probs=_prompt_log_probs(task, request))
        async with aclosing(self._stream(replace(task, params=going_on), timer)) as deltas:
            async for delta in deltas:
                yield replace(delta, cached_tokens=min(delta.cached_tokens, request.num_cached_tokens))

    async def _at_once(self, task: ChoiceTask, timer: ChoiceTimer) -> AsyncGenerator[Delta, None]:
        record = await self._client.add_request(list(task.prompt), task.params, request_uuid=task.uuid)
        request: DynamicInferenceRequest = record[-1]
        timer.finish(request)
        yield self._last(task, request, sent_text="", sent_tokens=0)

    async def _stream(self, task: ChoiceTask, timer: ChoiceTimer) -> AsyncGenerator[Delta, None]:
        detokenizer = self._tokenizer.incremental(shown=task.shown)
        sent_text, sent_tokens = "", 0
        held: list[int] = []
        updates = self._client.stream_request(list(task.prompt), task.params, request_uuid=task.uuid)
        async with aclosing(updates):
            async for update in updates:
                if update.new_tokens:
                    timer.first_token()
                if update.finished is not None:
                    timer.finish(update.finished)
                    yield self._last(task, update.finished, sent_text, sent_tokens, held)
                    return
                held += update.new_tokens
                text = detokenizer.push(update.new_tokens)
                sent_text += text
                sent_tokens += len(update.new_tokens)
                log_probs = _log_probs(update.new_tokens, update.new_log_probs, update.new_top_n_logprobs)
                if text or log_probs:
                    yield Delta(task.index, text, log_probs, tuple(held))
                    held = []

    def _last(
        self,
        task: ChoiceTask,
        request: DynamicInferenceRequest,
        sent_text: str,
        sent_tokens: int,
        held: Sequence[int] = (),
    ) -> Delta:
        """What is left to send once the engine's word on the whole answer is there."""
        _raise_if_failed(request)
        tokens = request.generated_tokens
        text = self._text(task, request)
        log_probs = _log_probs(tokens, request.generated_log_probs, request.generated_top_n_logprobs)
        if self._ended_by_token(task, tokens) and not task.with_every_token:
            log_probs = log_probs[: len(tokens) - 1]
        return Delta(
            task.index,
            text.removeprefix(sent_text),
            log_probs[sent_tokens:],
            (*held, *tokens[sent_tokens:]),
            _prompt_log_probs(task, request),
            finish_reason="length" if request.finish_reason == "length" else "stop",
            generated_tokens=len(tokens),
            cached_tokens=request.num_cached_tokens,
            weight_version=request.weight_version,
        )

    def _text(self, task: ChoiceTask, request: DynamicInferenceRequest) -> str:
        """The answer's text, with those special tokens that are shown."""
        text = request.generated_text or ""
        tokens = request.generated_tokens
        if not task.shown.intersection(tokens):
            return text
        told = tokens[: len(tokens) - 1] if self._ended_by_token(task, tokens) else tokens
        detokenizer = self._tokenizer.incremental(shown=task.shown)
        with_marks = detokenizer.push(told) + detokenizer.flush()
        # The engine cut the text where a stop text begins, which may be within the tokens or beyond them.
        excess = len(self._tokenizer.detokenize(told)) - len(text)
        return with_marks[: len(with_marks) - excess] if excess >= 0 else with_marks + text[excess:]

    def _ended_by_token(self, task: ChoiceTask, tokens: Sequence[int]) -> bool:
        """Whether the last of the answer's tokens is the one that ended it."""
        return bool(tokens) and tokens[-1] in self._tokenizer.eos_token_ids and not task.params.ignore_eos


def _log_probs(
    tokens: Sequence[int], values: Iterable[float] | None, tops: Sequence[Mapping[str, float]] | None
) -> tuple[TokenLogProb, ...]:
    numbers = [float(value) for value in (() if values is None else values)]
    likeliest = tops or [{}] * len(tokens)
    return tuple(TokenLogProb(*entry) for entry in zip(tokens, numbers, likeliest, strict=False))


def _prompt_log_probs(task: ChoiceTask, request: DynamicInferenceRequest) -> tuple[TokenLogProb, ...]:
    return _log_probs(task.prompt[1:], request.prompt_log_probs, request.prompt_top_n_logprobs)


def _raise_if_failed(request: DynamicInferenceRequest) -> None:
    """Turns the engine's refusal or failure into an answer."""
    if request.finish_reason == "abort":
        raise unavailable("the request was aborted", retry_after=RETRY_AFTER_ABORT, code="aborted")
    if not request.failed():
        return
    match error := request.error:
        case InvalidRequestError():
            raise ApiError(400, str(error), param=error.field)
        case ContextOverflowError(is_transient=False):
            raise ApiError(400, str(error), code="context_length_exceeded")
    message = f"the engine failed on this request: {error or 'it gave no reason'}"
    raise ApiError(500, message, kind="server_error", code="engine_error")

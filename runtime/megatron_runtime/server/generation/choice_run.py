"""Runs one choice: from a tokenized prompt to text, streamed or complete."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime.errors import AdapterNotFoundError, ContextOverflowError, InvalidRequestError
from megatron_runtime.inference_client import InferenceClient, StreamUpdate
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.model.tokenizer.detokenizer import IncrementalDetokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.errors import ApiError, context_exceeded, unavailable
from megatron_runtime.server.generation.choice import ChoiceTask, Delta, TokenLogProb, token_log_probs
from megatron_runtime.server.metrics import ChoiceTimer, FrontendMetrics

if TYPE_CHECKING:
    from megatron_runtime.inference_client.outstanding import RequestFuture, SubmittedBody
    from megatron_runtime.inference_request import DynamicInferenceRequest

RETRY_AFTER_ABORT = 5

Deliver = Callable[[Delta | Exception], None]
"""Callback for each delta of a choice, several with ``params.streaming``, or for the error that ends it."""


_ONLY_SCORES = {"num_tokens_to_generate": 0, "min_tokens": 0, "grammar": None, "streaming": False}
_WITHOUT_SCORES = {"skip_prompt_log_probs": True}


@dataclass(frozen=True)
class ChoiceRunner:
    """The objects that all choices of a request share."""

    client: InferenceClient
    tokenizer: Tokenizer
    metrics: FrontendMetrics
    _bodies: dict[tuple[object, ...], SubmittedBody] = field(default_factory=dict)

    def start(self, task: ChoiceTask, deliver: Deliver) -> ChoiceRun:
        """Submits a choice. Raises the errors of InferenceClient.add_request."""
        run = ChoiceRun(self, task, deliver)
        run.start()
        return run

    def submit(
        self,
        task: ChoiceTask,
        changes: Mapping[str, object],
        name: bytes | None,
        on_update: Callable[[StreamUpdate], None] | None,
    ) -> RequestFuture:
        """Submits a request of a choice, with changed parameters. Raises the errors of InferenceClient.add_request."""
        if not task.shares_body:
            params = _changed(task.params, **changes)
            params.seed = task.seed
            return self.client.add_request(list(task.prompt), params, request_uuid=name, on_update=on_update)
        key = (id(task.prompt), id(task.params), *changes)  # The tasks outlive this object.
        if key not in self._bodies:
            self._bodies[key] = self.client.shared_body(list(task.prompt), _changed(task.params, **changes))
        body = self._bodies[key].with_seed(task.seed)
        return self.client.add_request(body, request_uuid=name, on_update=on_update)


class ChoiceRun:
    """One choice from its submission to its end."""

    def __init__(self, runner: ChoiceRunner, task: ChoiceTask, deliver: Deliver) -> None:
        self._runner = runner
        self._tokenizer = runner.tokenizer
        self._timer = ChoiceTimer(runner.metrics, len(task.prompt))
        self._task = task
        self._deliver = deliver
        self._detokenizer = self._new_detokenizer()
        self._future: RequestFuture | None = None
        self._sent_text = ""
        self._sent_tokens = 0
        self._held: list[int] = []  # tokens that have produced no text yet
        self._has_begun = not self._tokenizer.drops_first_space  # whether a log probability had begins_text, if needed
        self._most_cached = len(task.prompt)

    def start(self) -> None:
        """Submits the request; a stream with log probabilities of the prompt takes two requests."""
        if self._task.params.streaming and self._task.wants_scored_prompt:
            self._score_prompt()
        else:
            self._submit({}, self._task.uuid, self._finish, streams=self._task.params.streaming)

    def close(self) -> None:
        """Aborts the request unless it has finished; nothing is delivered afterwards."""
        if self._future is not None:
            self._future.cancel()

    def _submit(
        self,
        changes: Mapping[str, object],
        name: bytes | None,
        on_finished: Callable[[DynamicInferenceRequest], None],
        *,
        streams: bool,
    ) -> None:
        self._future = self._runner.submit(self._task, changes, name, self._progress if streams else None)
        self._future.add_done_callback(partial(self._done, on_finished))

    def _done(self, on_finished: Callable[[DynamicInferenceRequest], None], future: RequestFuture) -> None:
        if future.cancelled():
            return
        try:
            on_finished(future.result()[-1])
        except Exception as error:
            self._deliver(error)

    def _score_prompt(self) -> None:
        """Obtains the log probabilities of the prompt before the stream begins.

        An engine reports them at the end of a request. So a first request only scores the prompt; the second finds the
        prompt's blocks in the prefix cache.
        """
        name = self._task.uuid and uuid.uuid5(uuid.UUID(bytes=self._task.uuid), "prompt").bytes
        self._submit(_ONLY_SCORES, name, self._go_on_from_scored, streams=False)

    def _go_on_from_scored(self, request: DynamicInferenceRequest) -> None:
        _raise_if_failed(request)
        self._most_cached = request.num_cached_tokens
        self._deliver(Delta(self._task.index, "", prompt_log_probs=self._prompt_log_probs(request)))
        self._submit(_WITHOUT_SCORES, self._task.uuid, self._finish, streams=True)

    def _progress(self, update: StreamUpdate) -> None:
        if update.new_tokens:
            self._timer.first_token()
        if update.finished is not None:
            return  # _finish handles it
        self._held += update.new_tokens
        text = self._detokenizer.push(update.new_tokens)
        self._sent_text += text
        self._sent_tokens += len(update.new_tokens)
        log_probs = self._log_probs(update.new_tokens, update.new_log_probs, update.new_top_n_logprobs)
        if text or log_probs:
            held, self._held = self._held, []
            self._deliver(Delta(self._task.index, text, log_probs, tuple(held)))

    def _finish(self, request: DynamicInferenceRequest) -> None:
        """Delivers the rest when the engine has finished the request."""
        self._timer.count(request)
        _raise_if_failed(request)
        tokens = request.generated_tokens
        log_probs = self._log_probs(tokens, request.generated_log_probs, request.generated_top_n_logprobs)
        if self._ended_by_token(request) and not self._task.with_every_token:
            log_probs = log_probs[: len(tokens) - 1]
        last = Delta(
            self._task.index,
            self._text(request).removeprefix(self._sent_text),
            log_probs[self._sent_tokens :],
            (*self._held, *tokens[self._sent_tokens :]),
            self._prompt_log_probs(request),
            finish_reason="length" if request.finish_reason == "length" else "stop",
            stop_reason=request.stop_reason,
            generated_tokens=len(tokens),
            cached_tokens=min(request.num_cached_tokens, self._most_cached),
            weight_version=request.weight_version,
            embedding=request.embedding,
            routing=None if request.routing_indices is None else request.routing_indices.tolist(),
        )
        self._timer.stop()
        self._deliver(last)

    def _text(self, request: DynamicInferenceRequest) -> str:
        """The answer's text, including the special tokens to keep."""
        text = request.generated_text or ""
        tokens = request.generated_tokens
        params = self._task.params
        if not params.skip_special_tokens or not self._task.shown.intersection(tokens):
            return text
        hides_last = self._ended_by_token(request) and not params.detokenize_stop_sequence
        visible = tokens[: len(tokens) - 1] if hides_last else tokens
        detokenizer = self._new_detokenizer()
        with_special = detokenizer.push(visible) + detokenizer.flush()
        # The engine cuts the text at a stop string, which may begin in the middle of a token.
        excess = len(self._tokenizer.detokenize(visible)) - len(text)
        return with_special[: len(with_special) - excess] if excess >= 0 else with_special + text[excess:]

    def _prompt_log_probs(self, request: DynamicInferenceRequest) -> tuple[TokenLogProb, ...]:
        return token_log_probs(self._task.prompt[1:], request.prompt_log_probs, request.prompt_top_n_logprobs)

    def _log_probs(
        self, tokens: Sequence[int], values: Iterable[float] | None, tops: Sequence[Mapping[str, float]] | None
    ) -> tuple[TokenLogProb, ...]:
        """Of the answer's next tokens, as far as the client asked for them."""
        if self._task.top_n is None:
            return ()
        entries = [entry.limited(self._task.top_n) for entry in token_log_probs(tokens, values, tops)]
        if not self._has_begun:
            first = next((at for at, entry in enumerate(entries) if self._is_visible(entry.token)), None)
            if first is not None:
                self._has_begun = True
                entries[first] = entries[first]._replace(begins_text=True)
        return tuple(entries)

    def _is_visible(self, token: int) -> bool:
        shows_all = not self._task.params.skip_special_tokens
        return shows_all or token in self._task.shown or not self._tokenizer.is_special(token)

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        skips = self._task.params.skip_special_tokens
        return self._tokenizer.incremental(skip_special_tokens=skips, shown=self._task.shown)

    def _ended_by_token(self, request: DynamicInferenceRequest) -> bool:
        """Whether a token ended the answer: an end-of-sequence token, or one of the request's stop tokens."""
        if request.finish_reason != "stop" or isinstance(request.stop_reason, str) or not request.generated_tokens:
            return False
        last = request.generated_tokens[-1]
        is_own_end = last in self._tokenizer.eos_token_ids and not self._task.params.ignore_eos
        return is_own_end or request.stop_reason is not None


def _changed(params: SamplingParams, **values: object) -> SamplingParams:
    changed = copy.copy(params)
    if values:
        changed.add_attributes(values)
    return changed


def _raise_if_failed(request: DynamicInferenceRequest) -> None:
    """Raises the ApiError for a request that the engine rejected or failed."""
    if request.finish_reason == "abort":
        raise unavailable("the request was aborted", retry_after=RETRY_AFTER_ABORT, code="aborted")
    if not request.failed():
        return
    match error := request.error:
        case AdapterNotFoundError():  # It was unloaded while the request was on its way.
            raise ApiError(404, f"model: {error}", param="model", code="model_not_found")
        case InvalidRequestError():
            raise ApiError(400, str(error), param=error.field)
        case ContextOverflowError(is_transient=False):
            raise context_exceeded(error)
    message = f"the engine failed on this request: {error or 'unknown reason'}"
    raise ApiError(500, message, kind="server_error", code="engine_error")

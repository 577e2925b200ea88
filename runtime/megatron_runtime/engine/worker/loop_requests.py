"""The requests that the coordinator has assigned to an engine."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from megatron_runtime import tracing
from megatron_runtime.engine.worker.protocol import RequestEngine
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import KEPT_BY_CLIENT, RequestBody, TokenChunk
from megatron_runtime.wire.codec import pack_body
from megatron_runtime.wire.items import Assignment

REPORT_INTERVAL = 8
"""Tokens between the progress reports of a request that does not stream: at most so many are lost with an engine."""


class Partial(Protocol):
    """The engine's report of new tokens of one request."""

    @property
    def new_tokens(self) -> list[int]: ...
    @property
    def new_log_probs(self) -> list[float] | None: ...
    @property
    def new_top_n_logprobs(self) -> list[dict[str, float]] | None: ...


@dataclass
class AssignedBody:
    """A body that several requests may share; its parameters are validated once."""

    content: RequestBody

    @cached_property
    def params(self) -> SamplingParams:
        """The sampling parameters, with the seed of the body. Raises InvalidRequestError."""
        return SamplingParams.deserialize(self.content.sampling_params)


@dataclass(eq=False)
class LoopRequest:
    """One request that is assigned to this engine, until the coordinator releases it."""

    uuid: bytes
    local_id: int
    dispatch: int
    params: SamplingParams
    made: TokenChunk
    """All tokens so far, including those of other engines."""
    trace: dict[str, str] = field(default_factory=dict)
    """The trace context."""
    reply: bytes | None = None
    """The packed result; kept until the coordinator acknowledges it."""
    is_aborted: bool = False
    grammar: str | None = None
    """Its grammar, while the engine keeps it for the request: until that has tokens."""


class _Delayed(NamedTuple):
    """How a request begins when its grammar is compiled."""

    params: SamplingParams
    begin: Callable[[], Any]


class LoopRequests:
    """The requests by UUID. A request that is assigned twice is served once.

    Args:
        engine: Serves the requests under ids of this class.
        on_compiled: Called from another thread when `begin_compiled` has requests to begin.
    """

    def __init__(self, engine: RequestEngine, on_compiled: Callable[[], None]) -> None:
        self._engine = engine
        self._on_compiled = on_compiled
        self._compiling: dict[LoopRequest, _Delayed] = {}
        self._compiled: deque[LoopRequest] = deque()
        self._by_uuid: dict[bytes, LoopRequest] = {}
        self._by_id: dict[int, LoopRequest] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._by_uuid)

    @property
    def uuids(self) -> list[bytes]:
        """Of all unfinished requests, and of those whose results are kept."""
        return list(self._by_uuid)

    def unfinished(self) -> Iterable[LoopRequest]:
        """The requests without a result."""
        return [request for request in self._by_uuid.values() if request.reply is None]

    def add(self, assignment: Assignment, body: AssignedBody) -> tuple[LoopRequest, int]:
        """Serve a request, or continue a known one.

        Returns:
            The request, and the number of its tokens that the coordinator has.
        """
        content = body.content
        num_reported = len(content.generated.tokens)
        if (known := self.resume(assignment._replace(received=num_reported))) is not None:
            return known, num_reported
        self.release(assignment.uuid)  # another engine has generated more tokens of it
        params = copy.copy(body.params)
        params.seed = params.seed if assignment.seed is None else assignment.seed
        request = self._keep(assignment, params, content.generated.since(0))
        request.trace = content.trace
        made = list(content.generated.tokens)
        reported = copy.copy(params)
        if not (assignment.streaming and params.streaming):
            reported.streaming_interval = 1 if assignment.streaming else REPORT_INTERVAL
        reported.streaming = True
        begin = partial(self._engine.add_request, request.local_id, content.prompt, reported, generated=made)
        self._begin(request, _Delayed(reported, begin))
        return request, num_reported

    @property
    def compiling(self) -> int:
        """Number of requests that wait for their grammars."""
        return len(self._compiling)

    @property
    def has_compiled(self) -> bool:
        """Whether `begin_compiled` has requests to begin."""
        return bool(self._compiled)

    def begin_compiled(self, most: int) -> list[LoopRequest]:
        """Serve requests whose grammars are compiled, at most so many. Returns those that failed."""
        failed = []
        for _ in range(min(most, len(self._compiled))):
            request = self._compiled.popleft()
            waiting = self._compiling.pop(request, None)
            if waiting is None:
                continue  # It was released, or aborted.
            try:
                waiting.begin()
                if request.is_aborted:
                    self._engine.abort_request(request.local_id)
            except Exception as error:
                self._end(request, _failure(request, error))
                failed.append(request)
        return failed

    def resume(self, assignment: Assignment) -> LoopRequest | None:
        """Continue a known request that is assigned again, or None if its body is needed for that."""
        known = self._by_uuid.get(assignment.uuid)
        if known is None or (known.reply is None and assignment.received > len(known.made.tokens)):
            return None
        known.dispatch = assignment.dispatch
        return known

    def abort(self, uuid: bytes) -> None:
        """End a request; its result has finish_reason "abort"."""
        request = self._by_uuid.get(uuid)
        if request is None or request.reply is not None:
            return
        request.is_aborted = True
        self._engine.abort_request(request.local_id)
        if request in self._compiling:  # It begins without its grammar, and ends.
            self._compiling[request].params.grammar = None
            self._release_grammar(request)
            self._note_compiled(request)

    def release(self, uuid: bytes) -> None:
        """Drop a request that the coordinator does not need any more, finished or not."""
        request = self._by_uuid.pop(uuid, None)
        if request is not None:
            del self._by_id[request.local_id]
            self._compiling.pop(request, None)
            self._release_grammar(request)
            if request.reply is None:
                self._engine.abort_request(request.local_id)

    def progress(self, local_id: int, partial: Partial) -> tuple[LoopRequest, int, TokenChunk] | None:
        """Record new tokens: (request, number of the first token, tokens), or None for a released request."""
        request = self._by_id.get(local_id)
        if request is None:
            return None
        self._release_grammar(request)
        start = len(request.made.tokens)
        chunk = TokenChunk(partial.new_tokens, partial.new_log_probs or [], partial.new_top_n_logprobs or [])
        request.made.extend(chunk)
        return request, start, chunk

    def finish(self, record: DynamicInferenceRequestRecord) -> LoopRequest | None:
        """Keep a result. Returns the request, or None for a released request."""
        request = self._by_id.get(record.request_id)
        if request is None:
            return None
        merged = record.merge()
        merged.uid = request.uuid.hex()
        self._engine.note_finished(merged)
        if merged.sampling_params is not None:
            merged.sampling_params.streaming = request.params.streaming
            merged.sampling_params.streaming_interval = request.params.streaming_interval
        tracing.note_served(request.trace, merged)
        try:
            reply = pack_body(_for_the_wire(merged.serialize(), request.params))
        except ValueError as error:
            reason = f"the result can't be sent: {error}; ask for fewer tokens or log probabilities"
            reply = _failure(request, InvalidRequestError(reason))
        self._end(request, reply)
        return request

    def refuse(self, assignment: Assignment, error: Exception) -> LoopRequest:
        """Keep an error as the result of a request that can't be served."""
        self.release(assignment.uuid)
        request = self._keep(assignment, SamplingParams(), TokenChunk())
        request.reply = _failure(request, error)
        return request

    def _begin(self, request: LoopRequest, waiting: _Delayed) -> None:
        """A request with a new grammar waits until it is compiled; the others do not wait for it."""
        grammar = waiting.params.grammar
        if grammar is None:
            waiting.begin()
            return
        compiled = self._engine.compile_grammar(grammar)
        request.grammar = grammar
        if compiled.done():
            waiting.begin()
            return
        self._compiling[request] = waiting
        compiled.add_done_callback(lambda _: self._note_compiled(request))

    def _note_compiled(self, request: LoopRequest) -> None:
        self._compiled.append(request)
        self._on_compiled()

    def _end(self, request: LoopRequest, reply: bytes) -> None:
        request.reply = reply
        self._release_grammar(request)

    def _release_grammar(self, request: LoopRequest) -> None:
        if request.grammar is not None:
            self._engine.release_grammar(request.grammar)
            request.grammar = None

    def _keep(self, assignment: Assignment, params: SamplingParams, made: TokenChunk) -> LoopRequest:
        request = LoopRequest(assignment.uuid, next(self._ids), assignment.dispatch, params, made)
        self._by_uuid[request.uuid] = self._by_id[request.local_id] = request
        return request


def _failure(request: LoopRequest, error: Exception) -> bytes:
    """The packed result of a request that has none."""
    failed = DynamicInferenceRequest(
        request_id=request.local_id, status=Status.FAILED, finish_reason="error", generated_text=""
    )
    failed.add_event_error_nontransient(error)
    failed.add_event_fail()
    return pack_body(failed.serialize())


def _for_the_wire(content: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    """The content without fields that the client has or does not need, and without staleness counters of 0."""
    for name in KEPT_BY_CLIENT if content["sampling_params"] else ():
        content["sampling_params"].pop(name, None)
    if not params.return_prompt_tokens:
        content["prompt_tokens"] = None
    content["remaining_prompt_tokens"] = None
    content["precomputed_block_hashes"] = []
    for name in ("policy_staleness", "kv_cache_staleness"):
        counters = content[name]
        if counters is not None and not any(counters[1]):
            content[name] = None
    return content

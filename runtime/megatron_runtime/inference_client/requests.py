"""A client's requests: submission, progress, resubmission and answers."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from megatron_runtime import tracing
from megatron_runtime.errors import (
    CoordinatorError,
    EngineError,
    InvalidRequestError,
    MegatronInferenceError,
    RequestTimeoutError,
    deserialize_error,
)
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client.outstanding import Outstanding, RequestFuture, SubmittedBody
from megatron_runtime.inference_client.result import InferenceResult, StreamUpdate
from megatron_runtime.inference_request import DynamicInferenceRequest, compute_block_hashes
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.batches import in_batches
from megatron_runtime.wire.bodies import KEPT_BY_CLIENT, Prompt, RequestBody, TokenChunk
from megatron_runtime.wire.codec import MalformedMessage, Message, is_list_of_integers, unpack_body
from megatron_runtime.wire.dealer import Dealer
from megatron_runtime.wire.items import Forwarded, RequestFailure, Submission, items, uuid_bytes

MAX_HASHED_BLOCKS = 65_536
"""Most blocks of a prompt that routing considers: their hashes fit into the header of a message."""
_ABORTED_OFFLINE = "the request was aborted while there was no coordinator"


class ClientRequests:
    """The outstanding requests of one client.

    Args:
        dealer: The connection.
        is_connected: Whether the coordinator has answered over the current connection.
        why_unreachable: Returns why there is no answer while there is no connection.
        deserialize: Return results as objects, or as dicts.
    """

    def __init__(
        self,
        dealer: Dealer,
        *,
        is_connected: Callable[[], bool],
        why_unreachable: Callable[[], str],
        deserialize: bool,
    ) -> None:
        self._dealer = dealer
        self._is_connected = is_connected
        self._why_unreachable = why_unreachable
        self._deserialize = deserialize
        self._outstanding: dict[bytes, Outstanding] = {}
        self._to_submit: list[Outstanding] = []
        self.hash_block_size = 0
        """Tokens per block that the coordinator hashes for routing; 0: no hashes."""
        self.futures: dict[int, RequestFuture] = {}
        self.next_id = 0

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None, *, is_shared: bool) -> SubmittedBody:
        """The body of a request, or of several with seeds of their own. Errors as for
        InferenceClient.add_request."""
        body = _checked_body(prompt, sampling_params)
        if is_shared:
            body.sampling_params.pop("seed", None)
        else:
            body.sampling_params.setdefault("seed", secrets.randbits(63))
        salt, adapter = (
            (None, None) if sampling_params is None else (sampling_params.cache_salt, sampling_params.adapter)
        )
        return SubmittedBody(body, _packed(body), self._hashes(prompt, salt, adapter))

    def submit(
        self,
        body: SubmittedBody,
        request_uuid: bytes | None,
        limit: float | None,
        on_update: Callable[[StreamUpdate], None] | None,
    ) -> RequestFuture:
        """Add a request, which `flush` sends in the next loop iteration.

        Raises:
            InvalidRequestError: The UUID is invalid, or that of another request.
        """
        loop = asyncio.get_running_loop()
        future = RequestFuture(self.next_id, request_uuid or uuid.uuid4().bytes, loop=loop)
        if len(future.request_uuid) != 16 or future.request_uuid in self._outstanding:
            raise InvalidRequestError(
                "request_uuid must be 16 bytes, and different from those of other outstanding requests",
                field="request_uuid",
            )
        entry = Outstanding(body.content.alone(), body.packed, body.hashes, body.seed, future, on_update)
        self.next_id += 1
        self._outstanding[future.request_uuid] = entry
        self.futures[future.request_id] = future
        future.add_done_callback(lambda _: self._forget(entry))
        future.add_done_callback(retrieve)
        if limit is not None:
            entry.timer = loop.call_later(limit, self._time_out, entry, limit)
        if not self._to_submit:
            # In the next loop iteration, so that requests submitted together share a message.
            loop.call_soon(self.flush)
        self._to_submit.append(entry)
        return future

    def abort(self, request_id: int) -> None:
        """Abort a request, if it has no answer yet."""
        future = self.futures.get(request_id)
        entry = self._outstanding.get(future.request_uuid) if future is not None else None
        if entry is None or entry.aborted:
            return
        entry.aborted = True
        if self._is_connected():
            self.flush()
            self._dealer.send(Headers.ABORT_REQUEST, [entry.future.request_uuid])
        else:
            _end(entry, CoordinatorError(_ABORTED_OFFLINE))

    def flush(self) -> None:
        """Send the requests submitted since the last call; without a connection they are sent after the next one."""
        waiting, self._to_submit = self._to_submit, []
        if not self._is_connected():
            return
        for submissions, bodies in in_batches(self._submissions(waiting), shares=True):
            wire = [submission.wire() for submission in submissions]
            self._dealer.send(Headers.SUBMIT_REQUEST, wire, bodies=bodies)

    @staticmethod
    def _submissions(entries: list[Outstanding]) -> Iterator[tuple[Submission, bytes]]:
        for entry in entries:
            if entry.future.done():
                continue
            try:
                body = entry.pack()
            except ValueError as error:
                # It has grown by the tokens that it received.
                _end(entry, InvalidRequestError(f"the request can't be sent again: {error}", field="prompt"))
                continue
            streams, received = entry.on_update is not None, len(entry.received.tokens)
            yield Submission(entry.future.request_uuid, streams, received, entry.hashes, entry.seed), body

    def resubmit(self) -> None:
        """Send all outstanding requests again, with the tokens received so far, to a coordinator that answers again."""
        for entry in list(self._outstanding.values()):
            if entry.aborted:
                _end(entry, CoordinatorError(_ABORTED_OFFLINE))
        self._to_submit = list(self._outstanding.values())
        self.flush()

    def handle(self, message: Message) -> None:
        """Handle progress, results and failures."""
        match message.header:
            case Headers.ENGINE_REPLY_PARTIAL:
                for item, body in zip(items(message, Forwarded.parse), message.bodies, strict=True):
                    self._progress(item, body)
            case Headers.ENGINE_REPLY:
                for request_uuid, body in zip(items(message, uuid_bytes), message.bodies, strict=True):
                    self._finish(request_uuid, body)
            case Headers.REQUEST_FAILED:
                for failure in items(message, RequestFailure.parse, with_bodies=False):
                    entry = self._outstanding.get(failure.uuid)
                    if entry is not None:
                        _end(entry, deserialize_error({"type": failure.kind, "message": failure.message}))

    def fail(self, error: MegatronInferenceError) -> None:
        """End all requests with this error."""
        for entry in list(self._outstanding.values()):
            _end(entry, error)

    def _progress(self, item: Forwarded, body: bytes) -> None:
        entry = self._outstanding.get(item.uuid)
        if entry is None or entry.on_update is None or entry.future.done():
            return
        known = len(entry.received.tokens)
        if item.start > known or item.start + item.length <= known:
            return  # the final reply fills a gap; known tokens are not repeated
        chunk = TokenChunk.unpack(body)
        if len(chunk.tokens) != item.length:
            raise MalformedMessage("a chunk of tokens does not have the length that its item states")
        self._deliver(entry, chunk.since(known - item.start), finished=None)

    def _finish(self, request_uuid: bytes, body: bytes) -> None:
        entry = self._outstanding.get(request_uuid)
        if entry is None or entry.future.done():
            return
        try:
            self._answer(entry, unpack_body(body))
        except Exception as error:
            _end(entry, EngineError(f"the engine's reply can't be decoded: {error!r}"))

    def _answer(self, entry: Outstanding, content: dict[str, Any]) -> None:
        content["latency"] = time.perf_counter() - entry.submitted
        content["request_id"] = entry.future.request_id
        if content["sampling_params"]:
            own = entry.body.sampling_params
            content["sampling_params"] |= {name: own.get(name) for name in KEPT_BY_CLIENT}
        if not self._deserialize and entry.on_update is None:
            entry.future.set_result(content)
            return
        request = DynamicInferenceRequest.deserialize(content)
        if entry.on_update is not None:
            known = len(entry.received.tokens)
            whole = TokenChunk(
                request.generated_tokens,
                list(request.generated_log_probs or []),
                request.generated_top_n_logprobs or [],
            )
            self._deliver(entry, whole.since(known), finished=request)
        if not entry.future.done():
            entry.future.set_result(InferenceResult([request], request.latency))

    def _deliver(self, entry: Outstanding, news: TokenChunk, *, finished: DynamicInferenceRequest | None) -> None:
        assert entry.on_update is not None
        entry.received.extend(news)
        try:
            entry.on_update(StreamUpdate(news.tokens, news.log_probs, news.top_n_logprobs, finished))
        except Exception as error:
            # The same message has tokens of other requests.
            if finished is None:
                self._drop(entry)
            _end(entry, error)

    def _time_out(self, entry: Outstanding, limit: float) -> None:
        self._drop(entry)
        why = "" if self._is_connected() else f": {self._why_unreachable()}"
        _end(entry, RequestTimeoutError(f"the request was not done within {limit:g} s{why}"))

    def _drop(self, entry: Outstanding) -> None:
        """End a request whose answer nothing waits for; the same UUID may be submitted again."""
        self._dealer.send(Headers.DROP_REQUEST, [entry.future.request_uuid])

    def _forget(self, entry: Outstanding) -> None:
        self._outstanding.pop(entry.future.request_uuid, None)
        self.futures.pop(entry.future.request_id, None)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.future.cancelled():
            self._drop(entry)

    def _hashes(self, prompt: Prompt, salt: str | None, adapter: str | None) -> list[int]:
        if not self.hash_block_size or isinstance(prompt, str):
            return []
        first = prompt[: self.hash_block_size * MAX_HASHED_BLOCKS]
        return compute_block_hashes(first, self.hash_block_size, salt, adapter)


def _end(entry: Outstanding, error: Exception) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)


def _checked_body(prompt: Prompt, sampling_params: SamplingParams | None) -> RequestBody:
    if not isinstance(prompt, str) and not is_list_of_integers(prompt):
        raise InvalidRequestError(
            f"prompt is a {type(prompt).__name__}; give text or a list of token ids", field="prompt"
        )
    params = (sampling_params or SamplingParams()).serialize_changed()
    return RequestBody(prompt, params, trace=tracing.carrier())


def _packed(body: RequestBody) -> bytes:
    try:
        return body.pack()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequestError(f"the request can't be sent: {error}", field="prompt") from error


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as retrieved: not awaiting the future ignores the error on purpose."""
    if not future.cancelled():
        future.exception()

"""The client of the coordinator: submits requests, streams their answers, and sends control signals."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import zmq.asyncio

from megatron_runtime.errors import (
    ClientStoppedError,
    ConfigurationError,
    CoordinatorError,
    InvalidStateError,
    MegatronInferenceError,
)
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client.async_stream import AsyncStream, StreamReplies
from megatron_runtime.inference_client.calls import ClientCalls
from megatron_runtime.inference_client.control_calls import ControlCalls
from megatron_runtime.inference_client.outstanding import RequestFuture, RequestStream, SubmittedBody
from megatron_runtime.inference_client.requests import ClientRequests, retrieve
from megatron_runtime.inference_client.result import StreamUpdate
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import Prompt
from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.dealer import Dealer
from megatron_runtime.wire.items import arguments, natural, text
from megatron_runtime.wire.protocol_version import OWN, Protocol

HEARTBEAT_SECONDS = 1.0


class InferenceClient(ControlCalls):
    """An asynchronous client of one coordinator. It belongs to one event loop and is not thread-safe.

    The client keeps a request until it is answered. When the connection or the coordinator is lost, the client
    reconnects and submits the outstanding requests again with the same UUIDs and the tokens that it has received;
    streams continue without gaps and repetitions. A request without an answer ends with an error at its deadline, or
    after ``coordinator_timeout`` without a coordinator.

    Args:
        inference_coordinator_address: A port of this machine, ``host:port`` or ``tcp://host:port``.
        inference_coordinator_port: The address as a port of this machine, by its older name.
        deserialize: Return results as objects; False returns the serialized merged request, a dict.
        key: The coordinator's shared secret. None: that of MEGATRON_COORDINATOR_KEY, or the one that a coordinator of
            this user generated; else plain sockets, allowed on loopback only.
        request_timeout: Default timeout of a request in seconds; None for no limit.
        coordinator_timeout: Seconds without a coordinator after which all outstanding requests and calls fail.
        transition_timeout: Default timeout of a control signal in seconds.
        strict_signals: Each signal is one edge of the lifecycle: one to suspend or stop a running service is refused.

    Raises:
        ConfigurationError: The address is invalid, missing or given twice, or a key is missing or too short.

    Attributes:
        listener_task: Runs until the client is stopped.
    """

    def __init__(
        self,
        inference_coordinator_address: int | str | None = None,
        deserialize: bool = True,
        *,
        inference_coordinator_port: int | None = None,
        key: str | None = None,
        request_timeout: float | None = None,
        coordinator_timeout: float = 60.0,
        transition_timeout: float = 120.0,
        strict_signals: bool = False,
    ) -> None:
        if (inference_coordinator_address is None) == (inference_coordinator_port is None):
            raise ConfigurationError(
                "give either inference_coordinator_address or inference_coordinator_port",
                field="inference_coordinator_address",
            )
        self._dealer = Dealer(
            inference_coordinator_address or inference_coordinator_port or "",
            name=b"client-" + secrets.token_hex(8).encode(),
            key=key,
            on_message=self._handle,
            on_connected=self._connect_with_inference_coordinator,
            on_disconnected=self._disconnected,
        )
        self._request_timeout = request_timeout
        self._strict_signals = strict_signals
        self._coordinator_timeout = coordinator_timeout
        self._requests = ClientRequests(
            self._dealer,
            is_connected=lambda: self.is_connected,
            why_unreachable=self._why_unreachable,
            deserialize=deserialize,
        )
        self.deserialize = deserialize
        """Whether results are objects."""
        self.streams: dict[int, AsyncStream] = {}
        """The unfinished streams of `add_request_streaming`, by the number of their request."""
        self._calls = ClientCalls(self._dealer, self._why_unreachable, transition_timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first_answer: asyncio.Future[None] | None = None
        self._disconnected_at = 0.0
        self._hello = 0
        self._refusal = ""
        self.coordinator_epoch: str | None = None
        """Identifies the coordinator process; None before its first answer."""
        self.listener_task: asyncio.Task[None] | None = None

    # Start and stop

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> Awaitable[None]:
        """Start connecting. The awaitable ends when the coordinator has answered.

        Requests may be submitted at once; they are sent when the connection is open.

        Raises:
            CoordinatorError: (from the awaitable) no answer within ``coordinator_timeout``.
            InvalidStateError: The client was started already.
        """
        if self._loop is not None:
            raise InvalidStateError("the client was started already", state="STARTED", allowed=["stop"])
        self._loop = loop or asyncio.get_running_loop()
        self._first_answer = self._loop.create_future()
        self._first_answer.add_done_callback(retrieve)
        self._disconnected_at = time.monotonic()
        self._dealer.open(self._loop)
        self.listener_task = self._loop.create_task(self._recv_task())
        return self._first_answer

    def stop(self) -> None:
        """Disconnect and close the socket. Outstanding requests end with a CoordinatorError, and the streams of
        `add_request_streaming` without one. Idempotent.
        """
        if self._loop is None:
            self._dealer.close()
            return
        self._dealer.send(Headers.DISCONNECT, "the client was stopped", False)
        if self.listener_task is not None:
            self.listener_task.cancel()
        self._dealer.close()
        self._loop = None
        for stream in list(self.streams.values()):
            stream.finish()
        self._fail_everything(ClientStoppedError("the client was stopped"))

    def fail_outstanding(self, error: MegatronInferenceError) -> None:
        """End all outstanding requests and calls with this error, for a caller that expects no more answers."""
        self._requests.fail(error)
        self._calls.fail(error)

    @property
    def context(self) -> zmq.asyncio.Context | None:
        """The ZeroMQ context, until the client is stopped."""
        return None if self.socket is None else self._dealer.context

    @property
    def socket(self) -> zmq.asyncio.Socket | None:
        """The DEALER socket, until the client is stopped. `start` connects it."""
        if self.listener_task is None:
            self._dealer.create_socket()
        return self._dealer.socket

    @property
    def completion_futures(self) -> dict[int, RequestFuture]:
        """The future of each outstanding request, by its number."""
        return self._requests.futures

    @property
    def next_request_id(self) -> int:
        """The number of the next request."""
        return self._requests.next_id

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator has answered over the current connection."""
        return self._calls.is_open

    # Requests

    def add_request(
        self,
        prompt: Prompt | SubmittedBody,
        sampling_params: SamplingParams | None = None,
        *,
        request_uuid: bytes | None = None,
        timeout: float | None = None,
        on_update: Callable[[StreamUpdate], None] | None = None,
    ) -> RequestFuture:
        """Submit a request.

        Args:
            prompt: Text or token ids, or a `shared_body` with the seed of this request, without parameters.
            sampling_params: Copied. A missing seed is chosen here, so that every engine continues alike.
            request_uuid: 16 bytes that identify the request; the coordinator does not serve a UUID twice.
            timeout: Seconds until it ends with a RequestTimeoutError; None: the default of the client.
            on_update: Called with new tokens, the last ones included; None: the request does not stream. An error that
                it raises aborts the request and is raised by the future.

        Returns:
            A future of the InferenceResult (a dict with ``deserialize=False``). A request that the engine refused or
            failed has status FAILED; without an answer, the future raises. Cancelling it aborts the request.

        Raises:
            InvalidStateError: The client is not started.
            InvalidRequestError: The prompt has a wrong type, or is too large.
        """
        self._require_started()
        limit = self._request_timeout if timeout is None else timeout
        if not isinstance(prompt, SubmittedBody):
            prompt = self._requests.prepare(prompt, sampling_params, is_shared=False)
        return self._requests.submit(prompt, request_uuid, limit, on_update)

    def shared_body(self, prompt: Prompt, sampling_params: SamplingParams) -> SubmittedBody:
        """A body for several requests that differ in their seeds alone, which all processes hold once. Errors as for
        `add_request`."""
        return self._requests.prepare(prompt, sampling_params, is_shared=True)

    def stream_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_uuid: bytes | None = None,
        timeout: float | None = None,
    ) -> RequestStream:
        """Submit a request and stream its answer; arguments and errors as for `add_request`."""
        stream = RequestStream()
        future = self.add_request(
            prompt, sampling_params, request_uuid=request_uuid, timeout=timeout, on_update=stream.push
        )
        stream.attach(future)
        return stream

    def add_request_streaming(self, prompt: Prompt, sampling_params: SamplingParams) -> AsyncStream:
        """Submit a request and stream its answer as Megatron's client does; errors as for `add_request`.

        Args:
            prompt: Text or token ids.
            sampling_params: Its ``streaming`` is set here. A missing seed is chosen as for `add_request`.

        Returns:
            A stream of dicts. ``{"partial": ...}`` has ``request_id`` and ``new_tokens``, and ``new_log_probs`` and
            ``new_top_n_logprobs`` if the request has them. The last dict is ``{"final": ...}`` with the finished
            request, serialized with ``deserialize=False``. A request without an answer ends the stream with its error.
        """
        sampling_params.streaming = True
        replies = StreamReplies(as_dict=not self.deserialize)
        future = self.add_request(prompt, sampling_params, on_update=replies.add)
        return replies.stream_into(self.streams, future, self._require_started())

    def abort_request(self, request_id: int) -> None:
        """Abort a request. Its result is FAILED, with finish_reason "abort" and the tokens so far."""
        self._requests.abort(request_id)

    # The coordinator

    def shutdown_coordinator(self) -> None:
        """End the coordinator process. The engines keep running."""
        self._require_started()
        self._requests.flush()
        self._dealer.send(Headers.SHUTDOWN)

    # Messages and connection

    def _require_started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise InvalidStateError(
                "the client is not started; await client.start()", state="STOPPED", allowed=["start"]
            )
        return self._loop

    def _connect_with_inference_coordinator(self) -> None:
        """Introduce this client after each (re-)connection, because the coordinator may be another process."""
        self._hello += 1
        self._refusal = ""
        self._dealer.send(Headers.CONNECT, OWN, self._hello)

    def _disconnected(self) -> None:
        self._disconnected_at = time.monotonic()
        self._calls.close()

    def _accepted(self, message: Message) -> None:
        versions, message = Protocol.first_of(message)
        if (reason := OWN.why_not(versions)) is not None:
            self._refused(reason)
            return
        epoch, block_size, hello = arguments(message, 3)
        if natural(hello, "hello") != self._hello:
            return  # an answer to an earlier hello: submitting now and after the next answer would submit twice
        self.coordinator_epoch = text(epoch, "epoch")
        self._requests.hash_block_size = natural(block_size, "block size")
        self._calls.open()
        if self._first_answer is not None and not self._first_answer.done():
            self._first_answer.set_result(None)
        self._requests.resubmit()

    def _refused(self, reason: str) -> None:
        """The coordinator refuses this client; another one may accept it after the next connection."""
        self._refusal = reason
        self._fail_everything(CoordinatorError(self._why_unreachable()))

    def _handle(self, message: Message) -> None:
        match message.header:
            case Headers.ENGINE_REPLY_PARTIAL | Headers.ENGINE_REPLY | Headers.REQUEST_FAILED:
                self._requests.handle(message)
            case Headers.SIGNAL_REPLY | Headers.SERVICE_STATE:
                self._calls.handle(message)
            case Headers.CONNECT_ACK:
                self._accepted(message)
            case Headers.CONNECT_REFUSED:
                self._refused(text(arguments(message, 1)[0], "reason"))
            case Headers.UNKNOWN_PEER:
                self._disconnected()
                self._connect_with_inference_coordinator()
            case Headers.BEAT:
                pass
            case _:
                raise MalformedMessage(f"{message.header.name} is not for clients")

    async def _recv_task(self) -> None:
        """Receive messages and send heartbeats until the client is stopped; `start` runs it as ``listener_task``."""
        heartbeats = asyncio.create_task(self._keep_alive())
        try:
            await self._dealer.listen()
        finally:
            heartbeats.cancel()

    async def _keep_alive(self) -> None:
        """Send heartbeats, and fail everything outstanding when there is no coordinator for too long."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.is_connected:
                self._dealer.send(Headers.HEARTBEAT)
            elif time.monotonic() - self._disconnected_at >= self._coordinator_timeout:
                self._fail_everything(CoordinatorError(self._why_unreachable()))

    def _why_unreachable(self) -> str:
        seconds = time.monotonic() - self._disconnected_at
        if self._refusal:
            return f"the coordinator at {self._dealer.address} refused this client: {self._refusal}"
        reason = "; it rejects this client's key" if self._dealer.refused_by_key else ""
        return f"no answer from a coordinator at {self._dealer.address} for {seconds:.1f} s{reason}"

    def _fail_everything(self, error: CoordinatorError) -> None:
        self.fail_outstanding(error)
        if self._first_answer is not None and not self._first_answer.done():
            self._first_answer.set_exception(error)

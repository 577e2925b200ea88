"""The coordinator: distributes the requests of clients over the data-parallel engines."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

from megatron_runtime import lifecycle
from megatron_runtime.config import DEFAULT_MAX_REQUESTS, PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator.core import Core
from megatron_runtime.data_parallel_inference_coordinator.handlers import handlers
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions, ServiceWeights
from megatron_runtime.data_parallel_inference_coordinator.socket_loop import RouterSocket
from megatron_runtime.errors import CoordinatorError
from megatron_runtime.headers import Headers
from megatron_runtime.inference_request import compute_block_hashes
from megatron_runtime.wire import codec

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
BUSY_REQUESTS = 16
"""Number of outstanding requests from which on the loop batches messages."""
BATCH_SECONDS = 0.002
"""Pause before an iteration of a busy loop, so that many requests or replies share a message."""


class ReadyEvent(Protocol):
    """A threading or multiprocessing event."""

    def set(self) -> None: ...


class DataParallelInferenceCoordinator:
    """Routes requests to the registered engines, and control signals to all of them.

    The constructor binds the socket; `start` runs until `stop`, until a client sends SHUTDOWN, or until SIGTERM in a
    process that `entrypoint` runs. Engines may register, leave and return at any time; requests wait while no engine is
    registered. No message and no lost peer ends the loop.

    Args:
        pipe_connection: Receives the address and is closed; may be None.
        data_parallel_size: Expected number of engines; more and fewer work too.
        tokenizer: For `detokenize`, and to hash prompts that are text; may be None, since engines detokenize their
            results and clients hash token ids.
        inference_coordinator_port: Port to listen on; None, or a port that is in use, means any free port.
        deterministic_mode: Route over the engines in the order of their replica groups, not of their registration.
        block_size_tokens: Tokens per hashed block.
        enable_prefix_caching: Route by prompt prefixes, if the policy does.
        prefix_caching_coordinator_policy: How the engine of a request is chosen.
        schedule_output_path: File for the routing decisions, written when the loop ends.
        host: Address to listen on; all but loopback addresses need a key.
        key: Shared secret of all peers; None means plain sockets.
        initial_state: The state that engines are brought to before they get requests. A coordinator that replaces
            another one needs the state of the service.
        initial_weights: Version and path of the weights that engines load before they get requests; None: engines keep
            their weights. A coordinator that replaces another one needs the last argument of its `on_weights`.
        request_timeout: Seconds that a request waits while no engine is registered.
        engine_timeout: Seconds without a message after which an engine counts as lost.
        prefix_caching_routing_alpha: Weight, 0 to 1, of a known prefix against the load.
        max_requests: Number of requests with which an engine counts as full in prefix routing.

    Raises:
        ConfigurationError: host needs a key or can't be bound, or prefix_caching_routing_alpha is out of range.
    """

    CoordinatorState = lifecycle.CoordinatorState

    def __init__(
        self,
        pipe_connection: Connection | None,
        data_parallel_size: int,
        tokenizer: Any = None,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
            PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
        ),
        schedule_output_path: str | None = None,
        *,
        host: str = "127.0.0.1",
        key: str | None = None,
        initial_state: lifecycle.CoordinatorState | str = lifecycle.CoordinatorState.RUNNING,
        initial_weights: tuple[int, str] | None = None,
        request_timeout: float = 120.0,
        engine_timeout: float = 5.0,
        prefix_caching_routing_alpha: float = 0.5,
        max_requests: int = DEFAULT_MAX_REQUESTS,
    ) -> None:
        if isinstance(initial_state, str):
            initial_state = lifecycle.CoordinatorState[initial_state.upper()]
        options = CoordinatorOptions(
            data_parallel_size=data_parallel_size,
            inference_coordinator_port=inference_coordinator_port,
            deterministic_mode=deterministic_mode,
            block_size_tokens=block_size_tokens,
            enable_prefix_caching=enable_prefix_caching,
            prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy(prefix_caching_coordinator_policy),
            schedule_output_path=schedule_output_path,
            host=host,
            initial_state=initial_state,
            initial_weights=None if initial_weights is None else ServiceWeights(*initial_weights),
            request_timeout=request_timeout,
            engine_timeout=engine_timeout,
            prefix_caching_routing_alpha=prefix_caching_routing_alpha,
            max_requests=max_requests,
        )
        self._open(options, tokenizer, key)
        if pipe_connection is not None:
            pipe_connection.send(self.address)
            pipe_connection.close()

    @classmethod
    def from_options(cls, options: CoordinatorOptions, *, key: str | None) -> Self:
        """A coordinator with these options; errors as for the class."""
        return cls(None, key=key, **vars(options))

    def _open(self, options: CoordinatorOptions, tokenizer: Any, key: str | None) -> None:
        self.data_parallel_size = options.data_parallel_size
        self.tokenizer = tokenizer
        self._core = Core(
            options,
            handlers(),
            time.monotonic,
            epoch=secrets.token_hex(8),
            # Milliseconds: the next coordinator process starts with a higher one than this one can reach.
            first_revision=time.time_ns() // 1_000_000,
            hash_prompt=self.compute_request_hashes,
        )
        self._router_socket = RouterSocket(options.host, options.inference_coordinator_port, key)
        self._router_socket.on_refused = lambda: self._core.protocol_errors.add("a connection without the right key")
        self.address = self._router_socket.address
        """The address for engines and clients: ``tcp://host:port``."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called by the loop about twice a second."""
        self.on_weights: Callable[[ServiceWeights | None], None] = lambda _: None
        """Called with the service's weights when they change."""
        self._core.weights.on_change = lambda weights: self.on_weights(weights)

    # Attributes by the names of Megatron

    @property
    def router_socket(self) -> Any:
        """The ROUTER socket that engines and clients connect to."""
        return self._router_socket.socket

    @property
    def identities_of_data_parallel_ranks(self) -> deque[bytes]:
        """Socket identities of the registered engines, in routing order."""
        return deque(engine.identity for engine in self._core.engines)

    @property
    def request_id_to_client_id(self) -> dict[int, bytes]:
        """The client of each outstanding request, by the coordinator's number."""
        return {entry.server_id: entry.client for entry in self._core.dispatcher.requests.values()}

    @property
    def request_id_to_client_request_id(self) -> dict[int, bytes]:
        """The client's UUID of each outstanding request, by the coordinator's number."""
        return {entry.server_id: entry.uuid for entry in self._core.dispatcher.requests.values()}

    @property
    def next_request_id(self) -> int:
        """The number of the next request."""
        return self._core.dispatcher.next_request_id

    @property
    def state(self) -> lifecycle.CoordinatorState:
        """The state of the service, or the target of its transition."""
        return self._core.lifecycle.target

    # Routing

    def get_next_data_parallel_rank(self) -> bytes:
        """The socket identity of the next engine in round-robin order.

        Raises:
            CoordinatorError: No engine is ready.
        """
        return self._identity(self._core.router.next_in_turn(self._core.engines.candidates()))

    def compute_request_hashes(self, prompt: str | list[int]) -> list[int]:
        """Block hashes of a prompt; none without prefix routing, or for text without a tokenizer."""
        block_size = self._core.options.hash_block_size
        if not block_size or (isinstance(prompt, str) and self.tokenizer is None):
            return []
        tokens: list[int] = self.tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt
        return compute_block_hashes(tokens, block_size)

    def get_best_data_parallel_rank(self, request_hashes: Sequence[int]) -> bytes:
        """The socket identity of the engine that the policy chooses for a prompt with these hashes.

        Raises:
            CoordinatorError: No engine is ready.
        """
        return self._identity(self._core.router.pick(self._core.engines.candidates(), request_hashes))

    def _update_rank_hashes(self, rank_identity: bytes, request_hashes: Sequence[int]) -> None:
        """Record that a prompt with these hashes was assigned to this engine."""
        self._core.router.record(rank_identity, request_hashes)

    @staticmethod
    def _identity(engine: Any) -> bytes:
        if engine is None:
            raise CoordinatorError("no engine is ready for requests")
        identity: bytes = engine.identity
        return identity

    def _remove_engine(self, identity: bytes) -> None:
        """Remove an engine; its requests are assigned to others."""
        self._core.lose_engine(identity, "removed")

    def _send_to_engine(self, identity: bytes, payload: list[bytes]) -> bool:
        """Send frames to an engine. An engine that can't be reached is removed, and the result is False."""
        return self._send(identity, payload)

    def _send(self, peer: bytes, frames: list[bytes]) -> bool:
        if self._router_socket.send(peer, frames):
            return True
        try:
            self._core.unreachable(peer)
        except Exception as failure:
            # As for messages: a defect must not end the service.
            self._core.protocol_errors.add("the loss of a peer could not be handled", failure)
        return False

    def detokenize(self, finished_request: dict[str, Any]) -> None:
        """Set ``generated_text``, and ``prompt`` if it is missing, of a serialized merged request."""
        tokens = finished_request["generated_tokens"]
        params = finished_request.get("sampling_params") or {}
        if not params.get("detokenize_stop_sequence"):
            while tokens and tokens[-1] == self.tokenizer.eod:
                tokens = tokens[:-1]
        finished_request["generated_text"] = self.tokenizer.detokenize(tokens)
        prompt_tokens = finished_request.get("prompt_tokens")
        if finished_request.get("prompt") is None and prompt_tokens is not None:
            tagged = len(prompt_tokens) == 2 and prompt_tokens[0] == "tensor"
            finished_request["prompt"] = self.tokenizer.detokenize(prompt_tokens[1] if tagged else prompt_tokens)

    # The loop

    def start(self) -> None:
        """Run until `stop` or SHUTDOWN; then write the routing trace and close the socket."""
        core = self._core
        unforgotten = partial(core.protocol_errors.add, "a closed connection could not be forgotten")
        next_tick = core.clock()
        try:
            while not core.stopping:
                if len(core.dispatcher.requests) >= BUSY_REQUESTS:
                    time.sleep(BATCH_SECONDS)
                self._router_socket.receive(next_tick - core.clock(), core.handle)
                now = core.clock()
                if now >= next_tick:
                    core.tick(now)
                    self._router_socket.forget_closed(
                        core.is_known, codec.encode(Headers.BEAT, core.epoch), unforgotten
                    )
                    self.on_tick()
                    next_tick = now + TICK_SECONDS
                core.notify_subscribers()
                self._flush()
        finally:
            self._write_routing_trace()
            self._router_socket.close()

    def _write_routing_trace(self) -> None:
        path, text = self._core.options.schedule_output_path, self._core.routing_trace.text()
        if path is not None and text:
            Path(path).write_text(text)

    def _flush(self) -> None:
        """Send all messages. The loss of a peer that can't be reached may add messages for others."""
        lost: set[bytes] = set()
        not_encoded = partial(self._core.protocol_errors.add, "a message could not be encoded")
        while self._core.outbox:
            for peer, frames in self._core.outbox.drain(not_encoded):
                if peer not in lost and not self._send(peer, frames):
                    lost.add(peer)

    def stop(self) -> None:
        """End `start` soon; safe in any thread and in signal handlers. Engines and clients get no message."""
        self._core.stopping = True
        with contextlib.suppress(OSError):
            self._router_socket.wake()

    @classmethod
    def entrypoint(
        cls,
        pipe_connection: Connection | None,
        ready_event: ReadyEvent,
        data_parallel_size: int,
        tokenizer: Any = None,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
            PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
        ),
        schedule_output_path: str | None = None,
        **options: Any,
    ) -> None:
        """Run a coordinator in this process until SIGTERM. Arguments and errors are those of the class.

        Args:
            ready_event: Set once the socket is bound, so that peers can connect.
            options: The keyword-only arguments of the class.
        """
        coordinator = cls(
            pipe_connection,
            data_parallel_size,
            tokenizer,
            inference_coordinator_port,
            deterministic_mode,
            block_size_tokens,
            enable_prefix_caching,
            prefix_caching_coordinator_policy,
            schedule_output_path,
            **options,
        )
        signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ready_event.set()
        coordinator.start()
        logger.info("the coordinator at %s has ended", coordinator.address)

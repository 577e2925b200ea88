"""The coordinator without socket and clock: messages in, messages out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_runtime.data_parallel_inference_coordinator.adapter_rollout import AdapterRollout
from megatron_runtime.data_parallel_inference_coordinator.dispatcher import Dispatcher
from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.lifecycle_controller import LifecycleController
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.data_parallel_inference_coordinator.requests import ClientEntry
from megatron_runtime.data_parallel_inference_coordinator.routing import Router
from megatron_runtime.data_parallel_inference_coordinator.routing_trace import RoutingTrace
from megatron_runtime.data_parallel_inference_coordinator.weight_rollout import WeightRollout
from megatron_runtime.headers import Headers
from megatron_runtime.wire.codec import MalformedMessage, Message, decode
from megatron_runtime.wire.protocol_errors import ProtocolErrors
from megatron_runtime.wire.service_state import AdapterView, ServiceState

logger = logging.getLogger(__name__)

Handler = Callable[["Core", bytes, Message], None]


STALL_SECONDS = 2.0
"""Time between two ticks after which this process has evidently not run."""
CLIENT_TIMEOUT = 30.0
"""Seconds without a message after which a client counts as lost."""


@dataclass
class Ticks:
    """What is kept from one tick to the next."""

    last: float | None = None
    """The time of the last tick."""
    answered: set[bytes] = field(default_factory=set)
    """Unknown peers that were answered since then."""


class Core:
    """The state of the coordinator, and how messages change it.

    Every method adds the messages to send to ``outbox``. None raises for a malformed message.

    Args:
        handlers: The function that handles each kind of message.
        clock: Monotonic seconds.
        epoch: Identifies this coordinator process to its peers.
        first_revision: The first revision of the service's state; higher than every one of an earlier coordinator.
        hash_prompt: Returns the block hashes of a prompt that its client did not hash.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        handlers: Mapping[Headers, Handler],
        clock: Callable[[], float],
        *,
        epoch: str,
        first_revision: int,
        hash_prompt: Callable[[str | list[int]], list[int]],
    ) -> None:
        self.options = options
        self.clock = clock
        self.hash_prompt = hash_prompt
        self.epoch = epoch
        self.stopping = False
        self.generation_epoch: int | None = None
        """The epoch that a client set last; engines that register later receive it too."""
        self.outbox = Outbox()
        self.protocol_errors = ProtocolErrors(clock)
        self.clients: dict[bytes, ClientEntry] = {}
        self.engines = EngineRegistry(sort_by_group=options.deterministic_mode)
        self.router, self.routing_trace = _routing(options)
        self.dispatcher = Dispatcher(
            engines=self.engines,
            clients=self.clients,
            router=self.router,
            outbox=self.outbox,
            protocol_errors=self.protocol_errors,
            routing_trace=self.routing_trace,
            request_timeout=options.request_timeout,
        )
        self.weights = WeightRollout(
            engines=self.engines,
            outbox=self.outbox,
            latest=options.initial_weights,
            is_idle=lambda: self.lifecycle.is_idle,
            state=lambda: self.lifecycle.state,
        )
        self.adapters = AdapterRollout(
            self.engines, self.outbox, state=lambda: self.lifecycle.state, on_change=lambda: self.lifecycle.touch()
        )
        self.lifecycle = LifecycleController(
            engines=self.engines,
            outbox=self.outbox,
            target=options.initial_state,
            first_revision=first_revision,
            became_ready=self.dispatcher.assign_waiting,
            before_ready=lambda engine: self.adapters.next_step(engine) or self.weights.next_step(engine),
        )
        self._handlers, self._ticks = handlers, Ticks()

    def handle(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Handle one message. Malformed and unexpected messages are counted and dropped."""
        try:
            message = decode(frames)
            handler = self._handlers.get(message.header)
            if handler is None:
                raise MalformedMessage(f"{message.header.name} is not for the coordinator")
            handler(self, peer, message)
        except MalformedMessage as defect:
            self.protocol_errors.add(str(defect))
        except Exception as failure:
            # A defect of the coordinator must cost one message, not the service.
            self.protocol_errors.add("a handler of the coordinator failed", failure)

    def tick(self, now: float) -> None:
        """Detect lost peers and expired deadlines, and send heartbeats; call it about twice a second."""
        for task in (
            self._note_stall,
            self._beat_engines,
            self._beat_clients,
            self.dispatcher.expire,
            self.lifecycle.expire,
            self.weights.expire,
            self.adapters.expire,
            self._release,
        ):
            try:
                task(now)
            except Exception as failure:
                # As in `handle`: a defect must not end the service.
                self.protocol_errors.add("a periodic task of the coordinator failed", failure)

    def _note_stall(self, now: float) -> None:
        """Messages of the time in which this process was stopped are not received yet: no peer is lost by that."""
        if self._ticks.last is not None and now - self._ticks.last > STALL_SECONDS:
            logger.warning("this process did not run for %.1f s", now - self._ticks.last)
            for peer in (*self.engines, *self.clients.values()):
                peer.last_seen = now
        self._ticks = Ticks(now)
        for engine in self.engines:
            engine.pushed = 0

    def _release(self, _: float) -> None:
        self.outbox.release()

    def _beat_engines(self, now: float) -> None:
        for engine in self.engines:
            if now - engine.last_seen > self.options.engine_timeout:
                self.lose_engine(engine.identity, f"no message for {self.options.engine_timeout:g} s")
            else:
                self.outbox.put(engine.identity, Headers.BEAT, self.epoch)

    def _beat_clients(self, now: float) -> None:
        for client in list(self.clients.values()):
            if now - client.last_seen > CLIENT_TIMEOUT:
                self.lose_client(client.identity)
            else:
                self.outbox.put(client.identity, Headers.BEAT, self.epoch)

    def broadcast(self, header: Headers, *args: int) -> None:
        """Pass a message on to every engine; engines that register later get only the generation epoch."""
        if header is Headers.SET_GENERATION_EPOCH:
            (self.generation_epoch,) = args
        for engine in self.engines:
            self.outbox.put(engine.identity, header, *args)

    def notify_subscribers(self) -> None:
        """Send the state of the service to the subscribers that have an older revision."""
        revision, content = self.lifecycle.revision, None
        for client in self.clients.values():
            try:
                if client.subscribed and client.sent_revision < revision:
                    content = content or self.service_state().serialize()
                    client.sent_revision = revision
                    self.outbox.put(client.identity, Headers.SERVICE_STATE, None, content)
            except Exception as failure:
                # As in `handle`: a defect must not end the service.
                self.protocol_errors.add("the state of the service could not be sent", failure)

    def service_state(self) -> ServiceState:
        """The current state of the service."""
        return ServiceState(
            state=self.lifecycle.state,
            revision=self.lifecycle.revision,
            epoch=self.epoch,
            engines=tuple(engine.view() for engine in self.engines),
            unassigned_requests=len(self.dispatcher.waiting),
            outstanding_requests=len(self.dispatcher.requests),
            accepted_requests=self.dispatcher.next_request_id,
            dropped_messages=self.protocol_errors.total(),
            adapters=tuple(AdapterView(name, path) for name, path in self.adapters.served),
        )

    def lose_engine(self, identity: bytes, reason: str, *, failed: bool = False) -> EngineEntry | None:
        """Remove an engine and reassign its requests; ``failed`` if its step raised an error."""
        now = self.clock()
        engine = self.engines.remove(identity, now)
        if engine is not None:
            logger.info("%s is lost: %s", engine.name, reason)
            self.outbox.discard(identity)
            self.router.forget(identity)
            self.dispatcher.lose_engine(engine, f"{engine.name}: {reason}", now, failed=failed)
            self.lifecycle.engine_gone(engine, self.clock())
            self.weights.engine_gone(engine)
            self.adapters.engine_gone(engine)
        return engine

    def lose_client(self, identity: bytes, *, may_return: bool = True) -> None:
        """Remove a client and its requests, except those that a client may submit again by name."""
        client = self.clients.pop(identity, None)
        if client is not None:
            self.outbox.discard(identity)
            self.dispatcher.forget_client(client, self.clock(), may_return=may_return)

    def is_known(self, peer: bytes) -> bool:
        """Whether the peer is a client or a registered engine."""
        return peer in self.clients or self.engines.get(peer) is not None

    def answer_unknown_peer(self, peer: bytes) -> None:
        """Ask a peer to introduce itself, once per tick however many messages it has sent."""
        if peer not in self._ticks.answered:
            self._ticks.answered.add(peer)
            self.outbox.put(peer, Headers.UNKNOWN_PEER, self.epoch)

    def unreachable(self, peer: bytes) -> None:
        """Remove a peer to which a message could not be sent."""
        self.outbox.discard(peer)
        self.lose_engine(peer, "its connection is closed")
        self.lose_client(peer)


def _routing(options: CoordinatorOptions) -> tuple[Router, RoutingTrace]:
    policy, is_recorded = options.prefix_caching_coordinator_policy, options.schedule_output_path is not None
    router = Router(policy, alpha=options.prefix_caching_routing_alpha, max_requests=options.max_requests)
    return router, RoutingTrace(policy.value, options.data_parallel_size, is_recorded=is_recorded)

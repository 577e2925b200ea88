"""The handlers of the messages from engines and clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_runtime.data_parallel_inference_coordinator.adapter_rollout import AdapterCall
from megatron_runtime.data_parallel_inference_coordinator.core import Core, Handler
from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry
from megatron_runtime.data_parallel_inference_coordinator.requests import ClientEntry, RequestEntry
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import BROADCASTS, SIGNALS
from megatron_runtime.wire.batches import with_bodies
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.items import (
    EngineLoad,
    Finished,
    Progress,
    Registration,
    Submission,
    arguments,
    engine_state,
    flag,
    items,
    natural,
    seconds,
    text,
    uuid_bytes,
)
from megatron_runtime.wire.protocol_version import NONE, OWN, Protocol

logger = logging.getLogger(__name__)


def handlers() -> Mapping[Headers, Handler]:
    """The messages that the coordinator accepts, and their handlers."""
    table: dict[Headers, Handler] = {
        Headers.CONNECT: _connect,
        Headers.REGISTER: _register,
        Headers.HEARTBEAT: _heartbeat,
        Headers.SUBMIT_REQUEST: _submit,
        Headers.ABORT_REQUEST: _abort,
        Headers.DROP_REQUEST: _drop,
        Headers.ENGINE_REPLY: _reply,
        Headers.ENGINE_REPLY_PARTIAL: _partial,
        Headers.BODIES_NEEDED: _bodies_needed,
        Headers.STATE: _state,
        Headers.SERVICE_STATE: _service_state,
        Headers.UPDATE_WEIGHTS: _update_weights,
        Headers.WEIGHTS_UPDATED: _weights_updated,
        Headers.CHANGE_ADAPTERS: _change_adapters,
        Headers.ADAPTERS_ASSIGNED: _adapters_assigned,
        Headers.DRAIN: _drain,
        Headers.DISCONNECT: _disconnect,
        Headers.SHUTDOWN: _shutdown,
    }
    table.update(dict.fromkeys(SIGNALS.values(), _signal))
    table.update(dict.fromkeys(BROADCASTS, _broadcast))
    return table


def _client(core: Core, peer: bytes) -> ClientEntry:
    """The client that sent a message. An unknown peer is asked to connect (again)."""
    client = core.clients.get(peer)
    if client is None:
        raise _unknown_peer(core, peer)
    client.last_seen = core.clock()
    return client


def _engine(core: Core, peer: bytes) -> EngineEntry:
    """The engine that sent a message. An unknown peer is asked to register (again)."""
    engine = core.engines.get(peer)
    if engine is None:
        raise _unknown_peer(core, peer)
    engine.last_seen = core.clock()
    return engine


def _unknown_peer(core: Core, peer: bytes) -> MalformedMessage:
    core.answer_unknown_peer(peer)
    return MalformedMessage("a message from an unknown peer")


def _understood(core: Core, peer: bytes, message: Message, refusal: Headers) -> Message | None:
    """The message of a new peer without its versions; None if they are refused."""
    is_old = bool(message.args) and type(message.args[0]) is int
    versions, message = (NONE, message) if is_old else Protocol.first_of(message)
    reason = OWN.why_not(versions)
    if reason is None:
        return message
    core.protocol_errors.add(reason)
    core.outbox.put(peer, refusal, reason)
    return None


def _connect(core: Core, peer: bytes, whole: Message) -> None:
    message = _understood(core, peer, whole, Headers.CONNECT_REFUSED)
    if message is None:
        return
    hello = natural(arguments(message, 1)[0], "hello")
    if core.engines.get(peer) is not None:
        raise MalformedMessage("an engine tried to connect as a client")
    client = core.clients.setdefault(peer, ClientEntry(peer, core.clock()))
    client.last_seen = core.clock()
    core.outbox.put(peer, Headers.CONNECT_ACK, OWN, core.epoch, core.options.hash_block_size, hello)


def _register(core: Core, peer: bytes, whole: Message) -> None:
    message = _understood(core, peer, whole, Headers.REGISTER_REFUSED)
    if message is None:
        return
    registration = Registration.parse(message)
    if peer in core.clients:
        raise MalformedMessage("a client tried to register as an engine")
    now = core.clock()
    refusal = core.engines.refusal(registration, now)
    if refusal is not None:
        logger.warning("refused an engine: %s", refusal)
        core.lose_engine(peer, refusal)
        core.outbox.put(peer, Headers.REGISTER_REFUSED, refusal)
        return
    for predecessor in core.engines.predecessors(peer, registration):
        core.lose_engine(predecessor.identity, f"attempt {registration.attempt} of its replica group has registered")
        if predecessor.identity != peer:
            core.outbox.put(
                predecessor.identity, Headers.REGISTER_REFUSED, "another engine serves this replica group now"
            )
    engine = core.engines.register(peer, registration, now)
    logger.info("%s registered, %s", engine.name, engine.state.value)
    core.outbox.put(peer, Headers.REGISTER_ACK, OWN, core.epoch)
    if core.generation_epoch is not None:
        core.outbox.put(peer, Headers.SET_GENERATION_EPOCH, core.generation_epoch)
    core.lifecycle.touch()
    core.dispatcher.reconcile(engine, registration.claims, now)
    newer_weights = core.weights.engine_registered(engine, registration.weights_path)
    for outdated in (*newer_weights, *core.adapters.engine_registered(engine, registration.adapters)):
        outdated.ready = False
        core.lifecycle.steer(outdated, now)
    core.lifecycle.steer(engine, now)


def _heartbeat(core: Core, peer: bytes, message: Message) -> None:
    if peer in core.clients:
        arguments(message, 0)
        _client(core, peer)
        return
    engine = _engine(core, peer)
    state, load = arguments(message, 2)
    engine.load = EngineLoad.parse(load)
    core.lifecycle.engine_reports(engine, engine_state(state), core.clock())


def _submit(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    now = core.clock()
    hashes: list[int] = []
    for submission, body in with_bodies(items(message, Submission.parse), message.bodies):
        if submission.hashes == hashes:
            submission = submission._replace(hashes=hashes)  # The choices of a request need one list.
        hashes = submission.hashes
        if core.options.hash_block_size and not submission.hashes:
            submission = submission._replace(hashes=_hashes(core, body))
        core.dispatcher.submit(client, submission, body, now)


def _hashes(core: Core, body: bytes) -> list[int]:
    """The block hashes of a prompt that its client did not hash. A prompt that can't be hashed is left to its engine to
    refuse, since other requests of the same message are valid."""
    try:
        return core.hash_prompt(RequestBody.unpack(body).prompt)
    except Exception as failure:
        core.protocol_errors.add("a prompt that can't be hashed", failure)
        return []


def _abort(core: Core, peer: bytes, message: Message) -> None:
    for entry in _requests_of(core, peer, message):
        core.dispatcher.abort(entry)


def _drop(core: Core, peer: bytes, message: Message) -> None:
    for entry in _requests_of(core, peer, message):
        core.dispatcher.discard(entry)


def _requests_of(core: Core, peer: bytes, message: Message) -> list[RequestEntry]:
    """The named requests that this client has; another client may have submitted one of them again."""
    _client(core, peer)
    named = map(core.dispatcher.requests.get, items(message, uuid_bytes, with_bodies=False))
    return [entry for entry in named if entry is not None and entry.client == peer]


def _reply(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    for item, body in zip(items(message, Finished.parse), message.bodies, strict=True):
        core.dispatcher.finish(engine, item, body)


def _partial(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    for item, body in zip(items(message, Progress.parse), message.bodies, strict=True):
        core.dispatcher.progress(engine, item, body)


def _bodies_needed(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    for uuid in items(message, uuid_bytes, with_bodies=False):
        core.dispatcher.send_body(engine, uuid)


def _state(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    state = engine_state(arguments(message, 1)[0])
    if state is EngineState.STOPPED:
        core.lose_engine(peer, "it has stopped")
    elif state is EngineState.RESUMED:
        raise MalformedMessage("RESUMED is an event, not a state")
    else:
        core.lifecycle.engine_reports(engine, state, core.clock())


def _signal(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    call_id, timeout, strict = arguments(message, 3)
    now = core.clock()
    deadline = now + seconds(timeout, "timeout")
    core.lifecycle.signal(
        client.identity, natural(call_id, "call id"), message.header, deadline, now, strict=flag(strict, "strict")
    )


def _broadcast(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    has_epoch = message.header is Headers.SET_GENERATION_EPOCH
    call_id, timeout, *values = arguments(message, 2 + has_epoch)
    # All fields are checked before the engines get the message.
    call_id, _ = natural(call_id, "call id"), seconds(timeout, "timeout")
    core.broadcast(message.header, *(natural(value, "epoch") for value in values))
    reply = {"outcome": "done", "state": core.lifecycle.state}
    core.outbox.put(client.identity, Headers.SIGNAL_REPLY, call_id, reply)


def _update_weights(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    call_id, timeout, path = arguments(message, 3)
    deadline = core.clock() + seconds(timeout, "timeout")
    core.weights.start(client.identity, natural(call_id, "call id"), text(path, "path"), deadline)


def _weights_updated(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    version, error = arguments(message, 2)
    fits = core.weights.engine_reports(engine, natural(version, "version"), text(error, "error"))
    _steer_or_refuse(core, engine, None if fits else f"it can't load the weights of the other engines: {error}")


def _steer_or_refuse(core: Core, engine: EngineEntry, reason: str | None) -> None:
    """Continue with an engine that has reported, or refuse it for a reason."""
    if reason is None:
        core.lifecycle.touch()
        core.lifecycle.steer(engine, core.clock())
        return
    logger.warning("refused %s: %s", engine.name, reason)
    core.lose_engine(engine.identity, reason)
    core.outbox.put(engine.identity, Headers.REGISTER_REFUSED, reason)


def _change_adapters(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    call_id, timeout, name, path, replaces = arguments(message, 5)
    deadline = core.clock() + seconds(timeout, "timeout")
    core.adapters.start(
        AdapterCall(
            client.identity,
            natural(call_id, "call id"),
            deadline,
            text(name, "name"),
            text(path, "path"),
            flag(replaces, "replaces"),
        )
    )


def _adapters_assigned(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    version, error = arguments(message, 2)
    fits = core.adapters.engine_reports(engine, natural(version, "version"), text(error, "error"))
    if fits:
        engine.signal = None  # The next assignment, if there is one, need not wait until this one would be repeated.
    _steer_or_refuse(core, engine, None if fits else f"it can't load the adapters of the other engines: {error}")


def _service_state(core: Core, peer: bytes, message: Message) -> None:
    client = _client(core, peer)
    call_id, subscribe = arguments(message, 2)
    call_id = natural(call_id, "call id")
    client.subscribed = client.subscribed or flag(subscribe, "subscribe")
    client.sent_revision = core.lifecycle.revision
    core.outbox.put(peer, Headers.SERVICE_STATE, call_id, core.service_state().serialize())


def _drain(core: Core, peer: bytes, message: Message) -> None:
    engine = _engine(core, peer)
    arguments(message, 0)
    engine.draining = True
    core.outbox.release()
    core.lifecycle.touch()


def _disconnect(core: Core, peer: bytes, message: Message) -> None:
    reason, failed = arguments(message, 2)
    if core.lose_engine(peer, text(reason, "reason"), failed=flag(failed, "failed")) is None:
        core.lose_client(peer, may_return=False)


def _shutdown(core: Core, peer: bytes, message: Message) -> None:
    _client(core, peer)
    arguments(message, 0)
    core.stopping = True

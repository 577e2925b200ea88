"""Message types between clients, the coordinator and the engines, and the states of an engine."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Headers(IntEnum):
    """First element of every header frame; the tens group the numbers by purpose.

    Messages that Megatron has too have Megatron's names and numbers.
    """

    CONNECT = 0
    """client -> coordinator: connect. Always acknowledged or refused."""
    CONNECT_ACK = 1
    """coordinator -> client: connected, with the coordinator's epoch and its routing options."""
    REGISTER = 2
    """engine -> coordinator: register a replica group, with its attempt, its incarnation and the requests that it still
    holds. Always acknowledged."""
    REGISTER_ACK = 3
    """coordinator -> engine: registered."""
    REGISTER_REFUSED = 4
    """coordinator -> engine: not registered, and the reason (a newer attempt of the replica group is registered, or
    it speaks other versions of the protocol)."""
    HEARTBEAT = 5
    """engine or client -> coordinator: heartbeat; an engine adds its state and statistics."""
    BEAT = 6
    """coordinator -> all peers: heartbeat, with the epoch. A failed send shows that a peer is gone."""
    UNKNOWN_PEER = 7
    """coordinator -> unknown peer: connect or register first."""
    CONNECT_REFUSED = 8
    """coordinator -> client: not connected, and the reason (it speaks other versions of the protocol)."""

    SUBMIT_REQUEST = 20
    """client -> coordinator -> engine: new requests, a body frame each."""
    ENGINE_REPLY = 21
    """engine -> coordinator -> client: finished requests, a body frame each."""
    ENGINE_REPLY_PARTIAL = 22
    """engine -> coordinator -> client: new tokens of running requests, a body frame each."""
    ABORT_REQUEST = 23
    """client -> coordinator -> engine: cancel these requests. Each is answered with its tokens so far."""
    REPLY_ACK = 27
    """coordinator -> engine: drop these requests; their results have arrived, or their clients are gone."""
    BODIES_NEEDED = 29
    """engine -> coordinator: send the bodies of these requests, which were withheld."""
    DROP_REQUEST = 30
    """client -> coordinator: cancel these requests without an answer, so that the client may submit them again at once.
    """
    REQUEST_FAILED = 28
    """coordinator -> client: these requests can't be served, and the reason."""

    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    """client -> coordinator -> engine: requests generate in this epoch of a training from now on."""
    STOP = 45
    START_CUDA_PROFILER = 46
    """client -> coordinator -> engine: record a trace of the following steps."""
    STOP_CUDA_PROFILER = 47
    """client -> coordinator -> engine: end the trace and write it."""
    STATE = 48
    """engine -> coordinator: the engine has reached this state."""
    SIGNAL_REPLY = 49
    """coordinator -> client: the outcome of a lifecycle signal."""
    SERVICE_STATE = 50
    """client -> coordinator: subscribe to the state of the service; coordinator -> client: that state."""

    UPDATE_WEIGHTS = 51
    """client -> coordinator -> engine: load the weights at this path in place."""
    WEIGHTS_UPDATED = 52
    """engine -> coordinator: this version of the weights is loaded, or the old ones are kept because of an error."""
    INCREMENT_STALENESS = 53
    """client -> coordinator -> engine: count one more weight update in the staleness of every unfinished request."""
    RESET_PREFIX_CACHE = 54
    """client -> coordinator -> engine: forget the cached prefixes."""
    CHANGE_ADAPTERS = 55
    """client -> coordinator: load, replace or unload a LoRA adapter on every engine."""
    ASSIGN_ADAPTERS = 56
    """coordinator -> engine: have exactly these adapters of the service."""
    ADAPTERS_ASSIGNED = 57
    """engine -> coordinator: this version of the adapters is loaded, or the old ones are kept because of an error."""

    DISCONNECT = 60
    """engine or client -> coordinator: disconnect, with the reason and whether it is a failure."""
    SHUTDOWN = 61
    """client -> coordinator: stop the coordinator; the engines keep running."""
    DRAIN = 62
    """engine -> coordinator: route no new requests to this engine."""


REQUEST_MESSAGES = frozenset(
    {
        Headers.SUBMIT_REQUEST,
        Headers.ABORT_REQUEST,
        Headers.REPLY_ACK,
        Headers.SET_GENERATION_EPOCH,
        Headers.INCREMENT_STALENESS,
        Headers.RESET_PREFIX_CACHE,
        Headers.ASSIGN_ADAPTERS,
    }
)
"""Messages that change an engine's requests, or what they can name; the engine applies them in the order of their
arrival."""


class EngineState(StrEnum):
    """State of an engine. States in -ING are transitional; RESUMED is passed on the way to PAUSED."""

    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    UNPAUSING = "UNPAUSING"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    RESUMING = "RESUMING"
    RESUMED = "RESUMED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"

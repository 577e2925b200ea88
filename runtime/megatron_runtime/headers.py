"""The message types between clients, the coordinator and the engines, and the states of engines."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Headers(IntEnum):
    """First element of every header frame; the tens group the numbers by purpose.

    Messages with the same meaning as one of Megatron have its name and number.
    """

    CONNECT = 0
    """client -> coordinator: introduces a client. Always answered."""
    CONNECT_ACK = 1
    """coordinator -> client: answers CONNECT, with the coordinator's epoch and block size."""
    REGISTER = 2
    """engine -> coordinator: registers an engine with its requests. Always answered."""
    REGISTER_ACK = 3
    """coordinator -> engine: the engine is registered."""
    REGISTER_REFUSED = 4
    """coordinator -> engine: the engine is refused, with the reason (a newer attempt of its replica group serves)."""
    HEARTBEAT = 5
    """engine or client -> coordinator: heartbeat; an engine adds its state and load."""
    BEAT = 6
    """coordinator -> all peers: heartbeat, with the epoch. The coordinator detects a lost peer when sending fails."""
    UNKNOWN_PEER = 7
    """coordinator -> unknown peer: connect or register (again) first."""

    SUBMIT_REQUEST = 20
    """client -> coordinator -> engine: new requests, a body frame each."""
    ENGINE_REPLY = 21
    """engine -> coordinator -> client: finished requests, a body frame each."""
    ENGINE_REPLY_PARTIAL = 22
    """engine -> coordinator -> client: new tokens of running requests, a body frame each."""
    ABORT_REQUEST = 23
    """client -> coordinator -> engine: abort these requests."""
    REPLY_ACK = 27
    """coordinator -> engine: drop these requests; their results arrived, or are not needed any more."""
    REQUEST_FAILED = 28
    """coordinator -> client: these requests failed, with the error."""

    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    STOP = 45
    STATE = 48
    """engine -> coordinator: the state of the engine."""
    SIGNAL_REPLY = 49
    """coordinator -> client: the outcome of a control signal."""
    SERVICE_STATE = 50
    """client -> coordinator: requests the state of the service, or subscribes; coordinator -> client: the state."""

    UPDATE_WEIGHTS = 51
    """client -> coordinator -> engine: load the weights at this path in place."""
    WEIGHTS_UPDATED = 52
    """engine -> coordinator: the engine has this version of the weights, or keeps its weights because of an error."""

    DISCONNECT = 60
    """engine or client -> coordinator: disconnects, with the reason, and whether it is a failure."""
    SHUTDOWN = 61
    """client -> coordinator: end the coordinator; engines go on."""
    DRAIN = 62
    """engine -> coordinator: the engine drains; assign no new requests."""


class EngineState(StrEnum):
    """The state of an engine. Those of a transition end in -ING; RESUMED is an event before PAUSED."""

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

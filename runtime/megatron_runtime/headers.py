"""The message types between clients, the coordinator and the engines, and the states that they speak of."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Headers(IntEnum):
    """First element of every header frame; the tens group the numbers by purpose.

    Where Megatron has a message of the same meaning, name and number are Megatron's.
    """

    CONNECT = 0
    """client -> coordinator: hello. Always answered."""
    CONNECT_ACK = 1
    """coordinator -> client: welcome, with the coordinator's epoch and routing facts."""
    REGISTER = 2
    """engine -> coordinator: this group, attempt and incarnation serves; with what it still holds. Always answered."""
    REGISTER_ACK = 3
    """coordinator -> engine: you are in."""
    REGISTER_REFUSED = 4
    """coordinator -> engine: you are not, and why (a newer attempt of your group serves)."""
    HEARTBEAT = 5
    """engine or client -> coordinator: alive; an engine adds its state and statistics."""
    BEAT = 6
    """coordinator -> everybody: alive, with the epoch. A send that fails tells the coordinator that a peer is gone."""
    UNKNOWN_PEER = 7
    """coordinator -> whoever speaks without having introduced itself: connect or register (again) first."""

    SUBMIT_REQUEST = 20
    """client -> coordinator -> engine: new requests, a body frame each."""
    ENGINE_REPLY = 21
    """engine -> coordinator -> client: finished requests, a body frame each."""
    ENGINE_REPLY_PARTIAL = 22
    """engine -> coordinator -> client: new tokens of running requests, a body frame each."""
    ABORT_REQUEST = 23
    """client -> coordinator -> engine: these requests are no longer wanted."""
    REPLY_ACK = 27
    """coordinator -> engine: forget these requests; their results arrived, or nobody waits for them any more."""
    REQUEST_FAILED = 28
    """coordinator -> client: these requests can't be served, and why."""

    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    STOP = 45
    STATE = 48
    """engine -> coordinator: the state that it has reached."""
    SIGNAL_REPLY = 49
    """coordinator -> client: what became of a control signal."""
    SERVICE_STATE = 50
    """client -> coordinator: tell me (and keep telling me); coordinator -> client: the state of the service."""

    UPDATE_WEIGHTS = 51
    """client -> coordinator -> engine: load the weights at this path in place."""
    WEIGHTS_UPDATED = 52
    """engine -> coordinator: it has this version of the weights, or has its old ones because of an error."""

    DISCONNECT = 60
    """engine or client -> coordinator: goodbye, with the reason, and whether that is a failure."""
    SHUTDOWN = 61
    """client -> coordinator: end the coordinator; engines are not touched."""
    DRAIN = 62
    """engine -> coordinator: send me nothing new."""


class EngineState(StrEnum):
    """Where an engine stands; those in -ING end by themselves. RESUMED is an event on the way to PAUSED."""

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

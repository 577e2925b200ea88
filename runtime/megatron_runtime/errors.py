"""Every error that the runtime raises or hands to a user.

MegatronInferenceError
├── ConfigurationError (ValueError)         a setting that can't work; names the field
├── InvalidRequestError (ValueError)        a request that can't be served; names the field
├── CheckpointError                         a model folder or file that can't be read
├── EngineError                             the engine failed while it ran
│   ├── EngineSuspendedError                asked to compute while its memory is given back
│   ├── InvalidLogitsError                  the model answered with NaN
│   ├── LostRankError                       ranks of the replica are gone or late; names them
│   └── LockStepError                       ranks of the replica have gone different ways
├── InvalidStateError (RuntimeError)        a lifecycle signal in the wrong state
├── StaleEpochError                         a decision about who leads that a newer one has overtaken
├── TransitionTimeoutError (TimeoutError)   a lifecycle signal that nobody acknowledged in time
├── RequestTimeoutError (TimeoutError)      a request that was not done by its deadline
├── CoordinatorError                        the coordinator can't be reached or refused
└── ContextOverflowError                    a request that the context has no room for
    ├── RequestOverflowError                more requests than rows
    ├── TokenOverflowError                  more tokens than one forward pass takes
    ├── BlockOverflowError                  more KV blocks than the pool holds
    ├── MaxSequenceLengthOverflowError      longer than the longest sequence; never transient
    ├── ActiveRequestCountOverflowError     more active requests than the batch takes
    └── TensorStateDeallocatedError         the KV cache is given back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MegatronInferenceError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(MegatronInferenceError, ValueError):
    """A setting has a value that can't work.

    Args:
        message: Says the field, the value and the mend.
        field: Name of the setting, for callers that report errors per field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(MegatronInferenceError, ValueError):
    """A request, or one of its sampling parameters, can't be served.

    Args:
        message: Says the field, the value and the limit.
        field: Name of the parameter, for callers that report errors per field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(MegatronInferenceError):
    """A checkpoint can't be read; the message names the file, what was found, what was expected, and the mend."""


class EngineError(MegatronInferenceError):
    """The engine failed while it ran."""


class EngineSuspendedError(EngineError):
    """The engine was asked to compute while its memory is given back; resume it first."""


class InvalidLogitsError(EngineError):
    """The model answered with NaN for this request, so that no token can be chosen."""


class LostRankError(EngineError):
    """Ranks of the replica are gone, or did not come in time, or to the world.

    Args:
        message: Says what was waited for, how long, and who is missing.
        missing: Those ranks, counted within the replica, or the world if it is not complete; empty when all answer,
            and one is only late.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class LockStepError(EngineError):
    """Ranks of one replica, which all have to make the same schedules, have made different ones."""


class InvalidStateError(MegatronInferenceError, RuntimeError):
    """A lifecycle signal came in a state that doesn't allow it.

    Args:
        message: Says the signal, the state and what is allowed.
        state: The state that the signal met.
        allowed: The signals that this state allows.
    """

    def __init__(self, message: str, *, state: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.state = state
        self.allowed = tuple(allowed)


class StaleEpochError(MegatronInferenceError):
    """A decision about who leads came after a newer one.

    Args:
        decision: What was asked for.
        epoch: Its number.
        known: That of the newest decision that is known.
    """

    def __init__(self, decision: str, epoch: int, known: int) -> None:
        super().__init__(f"{decision} of epoch {epoch}: this pod knows of epoch {known}")
        self.known = known


class TransitionTimeoutError(MegatronInferenceError, TimeoutError):
    """Not everybody acknowledged a lifecycle signal in time; the message names who is missing."""


class RequestTimeoutError(MegatronInferenceError, TimeoutError):
    """A request was not done by its deadline."""


class CoordinatorError(MegatronInferenceError):
    """The coordinator can't be reached, or refused what it was asked."""


class ContextOverflowError(MegatronInferenceError):
    """The context has no room for a request.

    Args:
        request_id: Id of the request, if there is one.
        message: Says what overflowed and by how much.
        is_transient: True if there may be room later.
    """

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(message or f"request {request_id} doesn't fit")
        self.request_id = request_id
        self.message = str(self)
        self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """There are more requests than the context has rows."""


class TokenOverflowError(ContextOverflowError):
    """There are more tokens than one forward pass takes."""


class BlockOverflowError(ContextOverflowError):
    """The KV pool has too few blocks."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """A sequence is longer than the engine takes; waiting doesn't help."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = False) -> None:
        del is_transient  # the wire carries the field, but this error never is
        super().__init__(request_id, message, is_transient=False)


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More requests are active than the batch takes."""


class TensorStateDeallocatedError(ContextOverflowError):
    """The KV cache is given back."""


_OVERFLOWS: dict[str, type[ContextOverflowError]] = {
    error.__name__: error
    for error in (
        ContextOverflowError,
        RequestOverflowError,
        TokenOverflowError,
        BlockOverflowError,
        MaxSequenceLengthOverflowError,
        ActiveRequestCountOverflowError,
        TensorStateDeallocatedError,
    )
}

_PLAIN: dict[str, type[MegatronInferenceError]] = {
    error.__name__: error
    for error in (
        ConfigurationError,
        InvalidRequestError,
        CheckpointError,
        EngineError,
        EngineSuspendedError,
        InvalidLogitsError,
        LostRankError,
        LockStepError,
        TransitionTimeoutError,
        RequestTimeoutError,
        CoordinatorError,
    )
}


def serialize_error(error: BaseException) -> dict[str, Any]:
    """The error as a plain dict: type, request_id, message, is_transient."""
    return {
        "type": type(error).__name__,
        "request_id": getattr(error, "request_id", None),
        "message": str(error),
        "is_transient": bool(getattr(error, "is_transient", False)),
    }


def deserialize_error(data: dict[str, Any]) -> MegatronInferenceError:
    """The error that serialize_error was given; a type unknown here becomes an EngineError that names it."""
    name, message = str(data["type"]), str(data["message"])
    if name in _OVERFLOWS:
        return _OVERFLOWS[name](data.get("request_id"), message, is_transient=bool(data.get("is_transient")))
    if name in _PLAIN:
        return _PLAIN[name](message)
    return EngineError(f"{name}: {message}")

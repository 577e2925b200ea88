"""Every error that the runtime raises or reports.

MegatronInferenceError
├── ConfigurationError (ValueError)         an invalid setting; names the field
├── InvalidRequestError (ValueError)        a request that can't be served; names the field
├── CheckpointError                         a model folder or file that can't be read
├── EngineError                             the engine failed while it ran
│   ├── EngineSuspendedError                a step of a suspended engine
│   ├── InvalidLogitsError                  the model returned NaN
│   ├── LostRankError                       ranks are lost or late; names them
│   └── LockStepError                       ranks of a replica group are out of step
├── InvalidStateError (RuntimeError)        a lifecycle signal in the wrong state
├── StaleEpochError                         an outdated decision about the leader
├── TransitionTimeoutError (TimeoutError)   a lifecycle signal that was not carried out in time
├── RequestTimeoutError (TimeoutError)      a request that was not finished by its deadline
├── CoordinatorError                        the coordinator can't be reached, or has refused
└── ContextOverflowError                    a request that exceeds the context
    ├── RequestOverflowError                more requests than rows
    ├── TokenOverflowError                  more tokens than one forward pass takes
    ├── BlockOverflowError                  more KV blocks than the pool holds
    ├── MaxSequenceLengthOverflowError      longer than the longest sequence; never transient
    ├── ActiveRequestCountOverflowError     more active requests than the batch takes
    └── TensorStateDeallocatedError         the KV cache is released
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MegatronInferenceError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(MegatronInferenceError, ValueError):
    """A setting has an invalid value.

    Args:
        message: Names the field, the value and a fix.
        field: Name of the setting, for callers that report errors per field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(MegatronInferenceError, ValueError):
    """A request, or one of its sampling parameters, can't be served.

    Args:
        message: Names the field, the value and the limit.
        field: Name of the parameter, for callers that report errors per field.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(MegatronInferenceError):
    """A checkpoint can't be read; the message names the file, the actual and the expected content, and a fix."""


class EngineError(MegatronInferenceError):
    """The engine failed while it ran."""


class EngineSuspendedError(EngineError):
    """The engine is suspended and can't run a step; resume it first."""


class InvalidLogitsError(EngineError):
    """The model returned NaN for this request, so that no token can be sampled."""


class LostRankError(EngineError):
    """Ranks of a replica group or of the world are lost or late.

    Args:
        message: Names the operation, the time that it waited, and the missing ranks.
        missing: The missing ranks, counted within the replica group, or within the world if that is incomplete; empty
            when all ranks answer and one is only late.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class LockStepError(EngineError):
    """Ranks of a replica group have computed different schedules."""


class InvalidStateError(MegatronInferenceError, RuntimeError):
    """A lifecycle signal came in a state that doesn't allow it.

    Args:
        message: Names the signal, the state and the allowed signals.
        state: The current state.
        allowed: The signals that this state allows.
    """

    def __init__(self, message: str, *, state: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.state = state
        self.allowed = tuple(allowed)


class StaleEpochError(MegatronInferenceError):
    """A decision about the leader is older than the newest known one.

    Args:
        decision: The decision.
        epoch: Its number.
        known: The number of the newest known decision.
    """

    def __init__(self, decision: str, epoch: int, known: int) -> None:
        super().__init__(f"{decision} of epoch {epoch}: this pod has a decision of epoch {known}")
        self.known = known


class TransitionTimeoutError(MegatronInferenceError, TimeoutError):
    """Not every engine carried out a lifecycle signal in time; the message names the missing ones."""


class RequestTimeoutError(MegatronInferenceError, TimeoutError):
    """A request was not finished by its deadline."""


class CoordinatorError(MegatronInferenceError):
    """The coordinator can't be reached, or has refused a call."""


class ContextOverflowError(MegatronInferenceError):
    """A request exceeds a limit of the context.

    Args:
        request_id: Id of the request, if there is one.
        message: Names the limit and the excess.
        is_transient: True if the request may fit later.
    """

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(message or f"request {request_id} doesn't fit")
        self.request_id = request_id
        self.message = str(self)
        self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """More requests than the context has rows."""


class TokenOverflowError(ContextOverflowError):
    """More tokens than the limit of a forward pass."""


class BlockOverflowError(ContextOverflowError):
    """The KV pool has too few blocks."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """A sequence is longer than the limit of the engine; this is never transient."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = False) -> None:
        del is_transient  # messages have the field, but this error is never transient
        super().__init__(request_id, message, is_transient=False)


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More active requests than the limit of the batch."""


class TensorStateDeallocatedError(ContextOverflowError):
    """The KV cache is released."""


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
    """The inverse of serialize_error; an unknown type becomes an EngineError that names it."""
    name, message = str(data["type"]), str(data["message"])
    if name in _OVERFLOWS:
        return _OVERFLOWS[name](data.get("request_id"), message, is_transient=bool(data.get("is_transient")))
    if name in _PLAIN:
        return _PLAIN[name](message)
    return EngineError(f"{name}: {message}")

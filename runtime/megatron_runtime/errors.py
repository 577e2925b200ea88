"""All errors that the runtime raises or reports.

MegatronInferenceError
├── ConfigurationError (ValueError)         an invalid setting; names the field
├── InvalidRequestError (ValueError)        a request that can't be served; names the field
│   └── AdapterNotFoundError                it names an adapter that is not loaded
├── CheckpointError                         a model folder or file that can't be read
├── EngineError                             the engine failed while it ran
│   ├── EngineSuspendedError                the engine's memory is released
│   ├── InvalidLogitsError                  the model computed NaN
│   ├── LostRankError                       ranks of the replica group are gone or late
│   └── LockStepError                       ranks of the replica group have diverged
├── InvalidStateError (RuntimeError)        a lifecycle signal in the wrong state
├── StaleEpochError                         a leader decision older than the latest one
├── TransitionTimeoutError (TimeoutError)   a lifecycle signal not acknowledged in time
├── RequestTimeoutError (TimeoutError)      a request not completed by its deadline
├── CoordinatorError                        the coordinator is unreachable or refused
└── ContextOverflowError                    a request that does not fit into the context
    ├── RequestOverflowError                more requests than rows
    ├── TokenOverflowError                  more tokens than one forward pass allows
    ├── BlockOverflowError                  more KV blocks than the pool has
    ├── MaxSequenceLengthOverflowError      longer than the maximum sequence; never transient
    ├── ActiveRequestCountOverflowError     more active requests than the batch allows
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
        message: Names the field, the value and the remedy.
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


class AdapterNotFoundError(InvalidRequestError):
    """No adapter of this name is loaded; the message has the loaded ones."""


class CheckpointError(MegatronInferenceError):
    """A checkpoint can't be read; the message names the file, what was found, what was expected, and the remedy."""


class EngineError(MegatronInferenceError):
    """The engine failed while it ran."""


class EngineSuspendedError(EngineError):
    """The engine's memory is released; resume it before it computes."""


class InvalidLogitsError(EngineError):
    """The model computed NaN for this request, so no token can be sampled."""


class LostRankError(EngineError):
    """Ranks of the replica group are gone, or did not answer or join in time.

    Args:
        message: Names the operation, the time waited, and the missing ranks.
        missing: The missing ranks, numbered within the replica group, or within the world while it is incomplete; empty
            when all ranks answer and one is only late.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class LockStepError(EngineError):
    """The ranks of a replica group computed different schedules, which must be equal."""


class InvalidStateError(MegatronInferenceError, RuntimeError):
    """A lifecycle signal is not allowed in the current state.

    Args:
        message: Names the signal, the state and the allowed signals.
        state: The current state.
        allowed: The signals that are allowed in this state.
    """

    def __init__(self, message: str, *, state: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.state = state
        self.allowed = tuple(allowed)


class StaleEpochError(MegatronInferenceError):
    """A leader decision is older than the latest one.

    Args:
        decision: The decision.
        epoch: Its number.
        known: Number of the latest known decision.
    """

    def __init__(self, decision: str, epoch: int, known: int) -> None:
        super().__init__(f"{decision} of epoch {epoch} is out of date: the latest one is of epoch {known}")
        self.known = known


class TransitionTimeoutError(MegatronInferenceError, TimeoutError):
    """A lifecycle signal was not acknowledged in time; the message names the missing engines."""


class RequestTimeoutError(MegatronInferenceError, TimeoutError):
    """A request was not completed by its deadline."""


class CoordinatorError(MegatronInferenceError):
    """The coordinator can't be reached, or refused a request."""


class ClientStoppedError(CoordinatorError):
    """The client was stopped before there was an answer."""


class ContextOverflowError(MegatronInferenceError):
    """A request exceeds a limit of the context.

    Args:
        request_id: Id of the request, if any.
        message: Names what overflowed and by how much.
        is_transient: Whether the request may fit later.
    """

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(message or f"request {request_id} doesn't fit")
        self.request_id = request_id
        self.message = str(self)
        self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """More requests than the context has rows."""


class TokenOverflowError(ContextOverflowError):
    """There are more tokens than one forward pass allows."""


class BlockOverflowError(ContextOverflowError):
    """The KV pool has too few blocks."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """A sequence is longer than the engine's maximum; never transient."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = False) -> None:
        del is_transient  # part of the wire format, but always False for this error
        super().__init__(request_id, message, is_transient=False)


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More requests are active than the batch allows."""


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
        AdapterNotFoundError,
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

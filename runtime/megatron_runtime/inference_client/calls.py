"""Calls of a client to the coordinator with one answer each: control signals and the state of the service."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_runtime.errors import (
    AdapterNotFoundError,
    CheckpointError,
    ClientStoppedError,
    CoordinatorError,
    InvalidRequestError,
    InvalidStateError,
    MegatronInferenceError,
    TransitionTimeoutError,
)
from megatron_runtime.headers import Headers
from megatron_runtime.lifecycle import STATE_AFTER
from megatron_runtime.notifier import Notifier
from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.dealer import Dealer
from megatron_runtime.wire.items import arguments, natural
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
ANSWER_GRACE_SECONDS = 5.0
"""Time after the timeout of a signal, at which the coordinator answers, until the client stops waiting."""

_REFUSALS = {"invalid": InvalidRequestError, "unknown": AdapterNotFoundError}
"""The error of a change of adapters by its outcome."""


@dataclass(eq=False)
class _PendingCall:
    header: Headers
    args: tuple[Any, ...]
    answer: asyncio.Future[Any]
    repeated: bool = False


class SignalTask(asyncio.Task[_Result]):
    """Runs a command. It records whether it is awaited, so that the failure of one that is not gets logged."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self.is_awaited = False
        super().__init__(work)
        super().add_done_callback(_log_ignored_failure)

    def __await__(self) -> Generator[Any, None, _Result]:
        self.is_awaited = True
        return super().__await__()

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Any = None) -> None:
        """As for every task; asyncio.wait, gather, shield and wait_for call this."""
        self.is_awaited = True
        super().add_done_callback(fn, context=context)


class ClientCalls:
    """Open calls. They are sent again after a reconnection; control signals are idempotent.

    Args:
        dealer: The connection.
        why_unreachable: Returns why there is no answer while there is no connection.
        transition_timeout: Default timeout of a control signal in seconds.
    """

    def __init__(self, dealer: Dealer, why_unreachable: Callable[[], str], transition_timeout: float) -> None:
        self._dealer = dealer
        self._why_unreachable = why_unreachable
        self._transition_timeout = transition_timeout
        self._calls: dict[int, _PendingCall] = {}
        self._ids = itertools.count()
        self._latest: ServiceState | None = None
        self._changed = Notifier()
        self.is_open = False

    def open(self) -> None:
        """The coordinator has answered; send again the calls that it may have missed."""
        self.is_open = True
        for call_id, call in self._calls.items():
            call.repeated = True
            self._dealer.send(call.header, call_id, *call.args)
        if self._latest is not None:
            # The subscription ended with the connection; the answer has the current state.
            self._dealer.send(Headers.SERVICE_STATE, next(self._ids), True)

    def close(self) -> None:
        """The connection is closed."""
        self.is_open = False

    def fail(self, error: MegatronInferenceError) -> None:
        """End all calls with this error."""
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(error)

    def signal(self, header: Headers, timeout: float | None, *, strict: bool) -> Awaitable[None]:
        """Send a control signal now; awaiting the answer waits until all engines have reached the state."""
        return self._command(lambda _: None, header, timeout, strict)

    def update_weights(self, path: str, timeout: float | None) -> Awaitable[int]:
        """As `signal`; the awaitable returns the version of the weights."""
        return self._command(lambda content: int(content["version"]), Headers.UPDATE_WEIGHTS, timeout, path)

    def change_adapters(self, name: str, path: str, timeout: float | None, *, replaces: bool) -> Awaitable[None]:
        """As `signal`; an empty ``path`` unloads the adapter."""
        return self._command(lambda _: None, Headers.CHANGE_ADAPTERS, timeout, name, path, replaces)

    def broadcast(self, header: Headers, *args: int) -> Awaitable[None]:
        """Send a message for all engines now; awaiting waits until the coordinator has passed it on."""
        return self._command(lambda _: None, header, None, *args)

    async def service_state(self, limit: float) -> ServiceState:
        """Request the state of the service, and subscribe to its changes."""
        call = self._start(Headers.SERVICE_STATE, True)
        await self._answer(call, limit)
        assert self._latest is not None
        return self._latest

    async def wait_for_state_change(self, after_revision: int, limit: float) -> ServiceState:
        """The state as soon as its revision is greater, or the current state at the timeout."""
        try:
            async with asyncio.timeout(limit):
                if self._latest is None:
                    await self.service_state(limit)
                while self._latest is None or self._latest.revision <= after_revision:
                    await self._changed.wait()
                return self._latest
        except TimeoutError:
            return await self.service_state(ANSWER_GRACE_SECONDS)

    def handle(self, message: Message) -> None:
        """Handle an answer, or a report of the service's state."""
        call_id, content = arguments(message, 2)
        if message.header is Headers.SERVICE_STATE:
            self._latest = ServiceState.deserialize(content)
            self._changed.notify()
        elif not _is_signal_reply(content):
            raise MalformedMessage("not an answer to a signal")
        if call_id is None:
            return
        call = self._calls.get(natural(call_id, "call id"))
        if call is not None and not call.answer.done():
            call.answer.set_result(content)

    def _command(
        self, result_of: Callable[[Any], _Result], header: Headers, timeout: float | None, *args: Any
    ) -> Awaitable[_Result]:
        limit = self._transition_timeout if timeout is None else timeout
        call = self._start(header, limit, *args)

        async def wait() -> _Result:
            return result_of(await self._await_done(call, limit))

        return SignalTask(wait())

    def _start(self, header: Headers, *args: Any) -> _PendingCall:
        call = _PendingCall(header, args, asyncio.get_running_loop().create_future())
        call_id = next(self._ids)
        self._calls[call_id] = call
        call.answer.add_done_callback(lambda _: self._calls.pop(call_id, None))
        if self.is_open:
            self._dealer.send(header, call_id, *args)
        return call

    async def _answer(self, call: _PendingCall, limit: float) -> Any:
        try:
            async with asyncio.timeout(limit):
                return await call.answer
        except TimeoutError:
            why = "the coordinator does not answer" if self.is_open else self._why_unreachable()
            raise CoordinatorError(f"no answer to {call.header.name.lower()} within {limit:g} s: {why}") from None

    async def _await_done(self, call: _PendingCall, limit: float) -> Any:
        content = await self._answer(call, limit + ANSWER_GRACE_SECONDS)
        name, state = call.header.name.lower(), content["state"]
        if content["outcome"] == "timeout":
            missing = ", ".join(content["missing"]) or "no engine"
            raise TransitionTimeoutError(f"{name} was not done within {limit:g} s; missing: {missing}")
        if content["outcome"] in _REFUSALS:
            raise _REFUSALS[content["outcome"]](content["message"], field="lora_name")
        if content["outcome"] == "failed":
            raise CheckpointError("; ".join(f"{engine}: {why}" for engine, why in sorted(content["failures"].items())))
        if content["outcome"] == "refused" and not (call.repeated and _is_done(call.header, state)):
            allowed = content["allowed"]
            raise InvalidStateError(
                f"{name} is not possible while the service is {state}; possible: {', '.join(allowed) or 'nothing'}",
                state=state,
                allowed=allowed,
            )
        return content


def _is_done(signal: Headers, state: str) -> bool:
    """Whether this is the state of the service after the signal."""
    return signal in STATE_AFTER and STATE_AFTER[signal].name == state


def _is_signal_reply(content: Any) -> bool:
    """Whether the content has the fields of its outcome."""
    if not isinstance(content, dict) or not isinstance(content.get("state"), str):
        return False
    match content.get("outcome"):
        case "done":
            return isinstance(content.get("version", 0), int)
        case "timeout":
            return _are_strings(content.get("missing"))
        case "invalid" | "unknown":
            return isinstance(content.get("message"), str)
        case "refused":
            return _are_strings(content.get("allowed"))
        case "failed":
            failures = content.get("failures")
            return isinstance(failures, dict) and _are_strings([*failures, *failures.values()])
    return False


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _log_ignored_failure(task: SignalTask[Any]) -> None:
    """Log a failure at once that would otherwise be noticed only when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        is_expected = task.is_awaited or isinstance(error, ClientStoppedError)
        level = logging.INFO if is_expected else logging.WARNING
        logger.log(level, "a control signal failed: %s", error)

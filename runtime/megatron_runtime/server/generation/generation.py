"""Runs all choices of one request concurrently and merges their deltas into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from megatron_runtime.errors import (
    ContextOverflowError,
    CoordinatorError,
    InvalidRequestError,
    MegatronInferenceError,
    RequestTimeoutError,
)
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.errors import ApiError, context_exceeded, too_late, unavailable
from megatron_runtime.server.generation.choice import ChoiceTask, Delta
from megatron_runtime.server.generation.choice_run import ChoiceRun, ChoiceRunner
from megatron_runtime.server.generation.idempotency import already_running


async def collect(generation: Generation) -> list[Delta]:
    """The deltas of all choices once they have ended, in the order of their arrival. Errors as for `deltas`."""
    async with aclosing(generation.deltas()) as deltas:
        return [delta async for arrived in deltas for delta in arrived]


class Generation:
    """Runs the choices of one request. Closing it early aborts the choices that still run."""

    def __init__(
        self, runner: ChoiceRunner, tasks: Sequence[ChoiceTask], *, timeout: float, admission: AdmissionController
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._timeout = timeout
        self._admission = admission
        self.size = len(tasks)
        """Number of answers that it generates."""
        self._runs: list[ChoiceRun] = []
        self._unfinished = len(tasks)
        self._arrived: list[Delta] = []
        self._error: Exception | None = None
        self._wakeup: asyncio.Future[None] | None = None  # cheaper than a new Event per token

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """The deltas of all choices as they arrive; each item has all that have arrived since the last one.

        Close the generator to abort. Raises ApiError when a choice fails or the timeout expires.
        """
        self._admission.enter(self)
        limit = asyncio.get_running_loop().call_later(self._timeout, self._time_out)
        try:
            self._start()
            while self._unfinished or self._arrived:
                if not self._arrived:
                    await self._wait()
                arrived, self._arrived = self._arrived, []
                yield arrived
        finally:
            limit.cancel()
            self._admission.leave(self)
            while self._runs:  # They refer to this object: a list of them would be a cycle, which is freed late.
                self._runs.pop().close()

    def abort(self, error: Exception) -> None:
        """Ends the request with this error unless all choices have finished."""
        if self._unfinished and self._error is None:
            self._error = error
            self._wake()

    def _start(self) -> None:
        try:
            for task in self._tasks:
                self._runs.append(self._runner.start(task, self._on_delta))
        except Exception as error:
            self.abort(as_api_error(error))

    def _on_delta(self, item: Delta | Exception) -> None:
        if isinstance(item, Exception):
            self.abort(as_api_error(item))
            return
        self._unfinished -= item.finish_reason is not None
        self._arrived.append(item)
        self._wake()

    async def _wait(self) -> None:
        """Waits for deltas; raises the error that arrives instead."""
        if self._error is None:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        if self._error is not None and not self._arrived:
            raise self._error

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _time_out(self) -> None:
        self.abort(too_late(f"the request was not completed within {self._timeout:g} seconds"))


def as_api_error(error: Exception) -> Exception:
    """The ApiError for an error of the runtime; other errors unchanged."""
    match error:
        case InvalidRequestError(field="request_uuid"):
            return already_running()
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field)
        case ContextOverflowError(is_transient=False):
            return context_exceeded(error)
        case RequestTimeoutError():
            return too_late(str(error))
        case CoordinatorError():
            return unavailable(str(error), retry_after=1, code="coordinator_unreachable")
        case MegatronInferenceError():
            return ApiError(500, str(error), kind="server_error", code="engine_error")
    return error

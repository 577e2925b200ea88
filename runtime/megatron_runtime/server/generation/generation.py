"""All choices of one request at once, merged into one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from megatron_runtime.errors import (
    ContextOverflowError,
    CoordinatorError,
    InvalidRequestError,
    MegatronInferenceError,
    RequestTimeoutError,
)
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.errors import ApiError, too_late, unavailable
from megatron_runtime.server.generation.choice import ChoiceTask, Delta
from megatron_runtime.server.generation.choice_run import ChoiceRun, ChoiceRunner
from megatron_runtime.server.generation.idempotency import already_running


class Generation:
    """Runs the choices of one request. Leaving it early aborts what still runs, so nothing is computed for nobody."""

    def __init__(
        self, runner: ChoiceRunner, tasks: Sequence[ChoiceTask], *, timeout: float, admission: AdmissionController
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._timeout = timeout
        self._admission = admission
        self.size = len(tasks)
        """How many answers it works on."""
        self._runs: list[ChoiceRun] = []
        self._unfinished = len(tasks)
        self._arrived: list[Delta] = []
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None  # cheaper than an Event, of which each token would make one

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """The deltas of all choices as they come, as many at a time as there are by then.

        Close it to abort. Raises ApiError when a choice fails, or not all are done in time.
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
            for run in self._runs:
                run.close()

    def abandon(self, error: Exception) -> None:
        """Ends the request with an error now, unless all of the answer is there."""
        if self._unfinished and self._error is None:
            self._error = error
            self._wake()

    def _start(self) -> None:
        try:
            for task in self._tasks:
                self._runs.append(self._runner.start(task, self._take))
        except Exception as error:
            self.abandon(as_api_error(error))

    def _take(self, item: Delta | Exception) -> None:
        if isinstance(item, Exception):
            self.abandon(as_api_error(item))
            return
        self._unfinished -= item.finish_reason is not None
        self._arrived.append(item)
        self._wake()

    async def _wait(self) -> None:
        """Until there are deltas; raises what has come instead."""
        if self._error is None:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._error is not None and not self._arrived:
            raise self._error

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _time_out(self) -> None:
        self.abandon(too_late(f"the request was not answered within {self._timeout:g} seconds"))


def as_api_error(error: Exception) -> Exception:
    """The answer that an error of the runtime deserves; errors of other kinds as they are."""
    match error:
        case InvalidRequestError(field="request_uuid"):
            return already_running()
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field)
        case ContextOverflowError(is_transient=False):
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestTimeoutError():
            return too_late(str(error))
        case CoordinatorError():
            return unavailable(str(error), retry_after=1, code="coordinator_unreachable")
        case MegatronInferenceError():
            return ApiError(500, str(error), kind="server_error", code="engine_error")
    return error

"""All choices of one request at once, merged into one stream of deltas."""

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
from megatron_runtime.server.admission import Admission
from megatron_runtime.server.choice import ChoiceRunner, ChoiceTask, Delta
from megatron_runtime.server.errors import ApiError, too_late, unavailable
from megatron_runtime.server.repetition import already_running


class Generation:
    """Runs the choices of one request. Leaving it early aborts what still runs, so nothing is computed for nobody."""

    def __init__(
        self, runner: ChoiceRunner, tasks: Sequence[ChoiceTask], *, timeout: float, admission: Admission
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._timeout = timeout
        self._admission = admission
        self.size = len(tasks)
        """How many answers it works on."""
        self._queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas of all choices as they come; raises ApiError when one fails. Close it to abort."""
        running = [asyncio.create_task(self._run(task)) for task in self._tasks]
        unfinished = len(running)
        self._admission.enter(self)
        try:
            while unfinished:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            self._admission.leave(self)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def abandon(self, error: ApiError) -> None:
        """Ends the request with an error now."""
        self._queue.put_nowait(error)

    async def _run(self, task: ChoiceTask) -> None:
        try:
            async with asyncio.timeout(self._timeout), aclosing(self._runner.run(task)) as deltas:
                async for delta in deltas:
                    self._queue.put_nowait(delta)
        except TimeoutError:
            self._queue.put_nowait(too_late(f"the request was not answered within {self._timeout:g} seconds"))
        except Exception as error:
            self._queue.put_nowait(as_api_error(error))


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

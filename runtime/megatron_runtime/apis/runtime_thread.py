"""An event loop in a separate thread, for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class RuntimeThread:
    """Runs until `stop`, in a daemon thread.

    Args:
        prepare: Called first in the thread, for example to choose its CUDA device.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._prepare = prepare
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="megatron-runtime", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Run a coroutine in the thread; cancelling the future cancels it.

        Raises:
            RuntimeError: The thread was stopped.
        """
        if self.loop.is_closed():
            coroutine.close()
            raise RuntimeError("the runtime was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the thread, and wait for it.

        Raises:
            RuntimeError: Called from the thread itself, or the thread was stopped.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called on the background event loop itself: await the coroutine instead")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all tasks, and end the thread. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

"""Futures of finished records, for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures

from megatron_runtime.inference_request import DynamicInferenceRequestRecord

RequestFuture = asyncio.Future[DynamicInferenceRequestRecord] | concurrent.futures.Future[DynamicInferenceRequestRecord]


def new_future() -> RequestFuture:
    """An asyncio future of the event loop of this thread, or a concurrent future if there is none."""
    loop = _running_loop()
    return concurrent.futures.Future() if loop is None else loop.create_future()


def resolve(future: RequestFuture, record: DynamicInferenceRequestRecord) -> None:
    """Resolve a future, from any thread. A cancelled future, or one of a closed event loop, is ignored."""
    if isinstance(future, concurrent.futures.Future):
        _set(future, record)
        return
    loop = future.get_loop()
    if loop.is_closed():
        return
    if _running_loop() is loop:
        _set(future, record)
    else:
        loop.call_soon_threadsafe(_set, future, record)


def _set(future: RequestFuture, record: DynamicInferenceRequestRecord) -> None:
    if not future.done():
        future.set_result(record)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

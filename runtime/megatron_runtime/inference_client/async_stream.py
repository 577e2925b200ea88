"""Streams with the interface of Megatron's AsyncStream, and the replies that a client puts into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from megatron_runtime.inference_client.outstanding import RequestFuture
from megatron_runtime.inference_client.result import StreamUpdate

STOP_ITERATION = Exception()
"""Ends a stream that was put into it."""


class AsyncStream:
    """Items for one consumer, from the same or another thread.

    Args:
        request_id: The request that the stream belongs to.
        cancel: Called when the consumer leaves the stream before its end.
        loop: The event loop of the consumer; None: the running one.
    """

    def __init__(
        self, request_id: int, cancel: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._loop = loop or asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._finished = False
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether the stream accepts no more items."""
        return self._finished

    def put(self, item: Any) -> None:
        """Add an item; an exception ends the stream with it. No effect on a finished stream."""
        if not self._finished:
            self._finished = _is_exception(item)
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream after its present items, with this exception if there is one. Only the first call counts."""
        self.put(STOP_ITERATION if exception is None else exception)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Any:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if _is_exception(item):
            self._ended = True
            if item is STOP_ITERATION:
                raise StopAsyncIteration
            raise item
        return item

    async def aclose(self) -> None:
        """Leave the stream: drop its items, and cancel the request unless the stream has finished."""
        if not self._finished:
            self._cancel()
        self._finished = self._ended = True
        self._items.put_nowait(STOP_ITERATION)  # for a consumer that waits

    async def generator(self) -> AsyncGenerator[Any, None]:
        """The items; closing the generator before its end leaves the stream."""
        try:
            async for item in self:
                yield item
        finally:
            await self.aclose()


def _is_exception(item: Any) -> bool:
    return isinstance(item, BaseException) or (isinstance(item, type) and issubclass(item, BaseException))


class StreamReplies:
    """Turns the updates of a request into the items of its stream.

    Args:
        as_dict: The finished request is serialized.
    """

    def __init__(self, *, as_dict: bool) -> None:
        self._as_dict = as_dict

    def stream_into(
        self, streams: dict[int, AsyncStream], future: RequestFuture, loop: asyncio.AbstractEventLoop
    ) -> AsyncStream:
        """The stream of this request's updates, which ends with the request, and is in ``streams`` until then."""

        def forget(_: object = None) -> None:
            streams.pop(future.request_id, None)

        def leave() -> None:
            forget()
            future.cancel()

        self._request_id = future.request_id
        self._stream = streams[future.request_id] = AsyncStream(future.request_id, leave, loop)
        future.add_done_callback(self._end)
        future.add_done_callback(forget)
        return self._stream

    def add(self, update: StreamUpdate) -> None:
        """Put an update into the stream."""
        if update.new_tokens:
            partial: dict[str, Any] = {"request_id": self._request_id, "new_tokens": update.new_tokens}
            if update.new_log_probs:
                partial["new_log_probs"] = update.new_log_probs
            if update.new_top_n_logprobs:
                partial["new_top_n_logprobs"] = update.new_top_n_logprobs
            self._stream.put({"partial": partial})
        if update.finished is not None:
            self._stream.put({"final": update.finished.serialize() if self._as_dict else update.finished})

    def _end(self, future: asyncio.Future[Any]) -> None:
        self._stream.finish(None if future.cancelled() else future.exception())

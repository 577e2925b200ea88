"""Streaming answers for callers on another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_client import RequestStream, StreamUpdate

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest
    from megatron_runtime.model.tokenizer.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class GenerationUpdate(StreamUpdate):
    """New tokens of an answer since the last update; the last one has the whole request as ``finished``."""

    new_text: str = ""
    """Complete characters only; joined, these are the finished request's ``generated_text``."""


async def stream_updates(
    open_stream: Callable[[], Coroutine[Any, Any, RequestStream]],
    detokenizer: IncrementalDetokenizer,
    call: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
) -> AsyncGenerator[GenerationUpdate, None]:
    """The updates of a stream on another event loop; closing the generator early aborts the request.

    Args:
        open_stream: Opens the stream on that event loop.
        detokenizer: Detokenizes the new tokens.
        call: Runs a coroutine on that event loop.
    """
    stream = await _opened(open_stream, call)
    sent = ""
    try:
        while (update := await call(_next(stream))) is not None:
            text = _text(update, detokenizer, sent)
            sent += text
            yield GenerationUpdate(**vars(update), new_text=text)
    finally:
        await call(stream.aclose())


async def _opened(
    open_stream: Callable[[], Coroutine[Any, Any, RequestStream]],
    call: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
) -> RequestStream:
    """A task that is cancelled meanwhile closes the stream, because the other event loop may have sent the request."""
    opening: asyncio.Future[RequestStream] = asyncio.ensure_future(call(open_stream()))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await call(opening.result().aclose())
        raise


async def _next(stream: RequestStream) -> StreamUpdate | None:
    return await anext(stream, None)


def _text(update: StreamUpdate, detokenizer: IncrementalDetokenizer, sent: str) -> str:
    finished: DynamicInferenceRequest | None = update.finished
    if finished is None:
        return detokenizer.push(update.new_tokens)
    # The engine's text of the whole answer, without a stop string that began inside of a token.
    return (finished.generated_text or "").removeprefix(sent)

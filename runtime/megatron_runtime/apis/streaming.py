"""An answer as it comes, for callers on an event loop of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_client import RequestStream, StreamUpdate

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest
    from megatron_runtime.model.tokenizer.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class GenerationUpdate(StreamUpdate):
    """What is new in an answer since the last update; the last one has the whole request as ``finished``."""

    new_text: str = ""
    """Never half a character; joined, these are the finished request's ``generated_text``."""


async def follow(
    open_stream: Callable[[], Coroutine[Any, Any, RequestStream]],
    detokenizer: IncrementalDetokenizer,
    call: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]],
) -> AsyncGenerator[GenerationUpdate, None]:
    """The updates of a stream that lives on another event loop; closing it early aborts the request.

    Args:
        open_stream: Opens the stream over there.
        detokenizer: Makes text of the tokens.
        call: Runs a coroutine over there.
    """
    stream: RequestStream = await call(open_stream())
    sent = ""
    try:
        while (update := await call(_next(stream))) is not None:
            text = _text(update, detokenizer, sent)
            sent += text
            yield GenerationUpdate(**vars(update), new_text=text)
    finally:
        await call(stream.aclose())


async def _next(stream: RequestStream) -> StreamUpdate | None:
    return await anext(stream, None)


def _text(update: StreamUpdate, detokenizer: IncrementalDetokenizer, sent: str) -> str:
    finished: DynamicInferenceRequest | None = update.finished
    if finished is None:
        return detokenizer.push(update.new_tokens)
    # The engine's word on the whole answer: a stop text that began within a token is cut from it, its end is added.
    return (finished.generated_text or "").removeprefix(sent)

"""Routes that generate: chats, completions and responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server import documentation
from megatron_runtime.server.admission import Admission
from megatron_runtime.server.answer import Answer
from megatron_runtime.server.chat import chat_chunks, chat_completion
from megatron_runtime.server.choice import Delta
from megatron_runtime.server.completions import completion, completion_chunks, completion_prompts
from megatron_runtime.server.conversation import chat_prompt, render
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.generation import Generation
from megatron_runtime.server.message_form import Reading
from megatron_runtime.server.parts import Frontend
from megatron_runtime.server.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from megatron_runtime.server.repetition import request_name
from megatron_runtime.server.request_log import CLIENT_CLOSED_REQUEST
from megatron_runtime.server.responses import response, response_events
from megatron_runtime.server.responses_protocol import ResponsesBody
from megatron_runtime.server.streaming import ClientLeft, EventStream, unless_client_leaves


@dataclass(frozen=True)
class _Style:
    """How an endpoint writes its answers."""

    id_prefix: str
    whole: Callable[[Answer, Sequence[Delta], Tokenizer], dict[str, Any]]
    chunks: Callable[[Answer, AsyncGenerator[Delta, None], Tokenizer], AsyncGenerator[dict[str, Any], None]]
    names_events: bool = False


_CHAT = _Style("chatcmpl", chat_completion, chat_chunks)
_COMPLETION = _Style("cmpl", completion, completion_chunks)
_RESPONSE = _Style("resp", response, response_events, names_events=True)


def generation_routes(frontend: Frontend) -> APIRouter:
    """The routes, without ``/v1`` before them."""
    router = APIRouter(tags=["generation"])

    @router.post(
        "/chat/completions",
        responses=answers(documentation.CHAT_ANSWER, streams=True),
        openapi_extra=request_example(documentation.CHAT_REQUEST),
    )
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        frontend.check_model(body.model)
        prompt = chat_prompt(body, frontend.tokenizer)
        reading = frontend.message_form.reading(body.tool_use, prompt)
        return await _answer(frontend, body, request, [prompt], _CHAT, reading)

    @router.post(
        "/completions",
        responses=answers(documentation.COMPLETION_ANSWER, streams=True),
        openapi_extra=request_example(documentation.COMPLETION_REQUEST),
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        frontend.check_model(body.model)
        return await _answer(frontend, body, request, completion_prompts(body, frontend.tokenizer), _COMPLETION)

    @router.post(
        "/responses",
        responses=answers(documentation.RESPONSE_ANSWER, streams=True),
        openapi_extra=request_example(documentation.RESPONSE_REQUEST),
    )
    async def responses(body: ResponsesBody, request: Request) -> Response:
        frontend.check_model(body.model)
        prompt = render(
            body.messages,
            frontend.tokenizer,
            body.chat_template_kwargs,
            param="input",
            tools=body.tool_use.for_template(),
        )
        reading = frontend.message_form.reading(body.tool_use, prompt)
        return await _answer(frontend, body, request, [prompt], _RESPONSE, reading)

    return router


async def _answer(
    frontend: Frontend,
    body: GenerationBody,
    request: Request,
    prompts: list[list[int]],
    style: _Style,
    reading: Reading | None = None,
) -> Response:
    generation = frontend.generation(body, prompts, request_name(request, body), reading)
    answer = Answer(body, prompts, style.id_prefix, reading or Reading())
    try:
        if body.stream:
            await unless_client_leaves(request, frontend.admission.admit(generation.size))
            chunks = style.chunks(answer, generation.deltas(), frontend.tokenizer)
            return EventStream(chunks, names_events=style.names_events)
        deltas = await unless_client_leaves(request, _collect(generation, frontend.admission))
    except ClientLeft:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(style.whole(answer, deltas, frontend.tokenizer))


async def _collect(generation: Generation, admission: Admission) -> list[Delta]:
    await admission.admit(generation.size)
    async with aclosing(generation.deltas()) as deltas:
        return [delta async for delta in deltas]

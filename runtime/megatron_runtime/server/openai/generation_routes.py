"""Routes that generate text: chat completions, completions and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server import documentation
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.body_route import BodyRoute, converting_route
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.generation.generation import Generation
from megatron_runtime.server.generation.idempotency import idempotency_key
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.megatron_requests import from_megatron
from megatron_runtime.server.messages.conversation import chat_prompt, render
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.openai.answer import Answer
from megatron_runtime.server.openai.chat import chat_chunks, chat_completion
from megatron_runtime.server.openai.completions import completion, completion_chunks, completion_prompts
from megatron_runtime.server.openai.responses import ResponseEvents, response
from megatron_runtime.server.openai.streaming import CancelOnDisconnect, ChunkWriter, ClientDisconnected, EventStream
from megatron_runtime.server.request_log import CLIENT_CLOSED_REQUEST


@dataclass(frozen=True)
class _AnswerFormat:
    """How an endpoint formats its answers."""

    id_prefix: str
    whole: Callable[[Answer, Sequence[Delta], Tokenizer], dict[str, Any]]
    chunks: Callable[[Answer, Tokenizer], ChunkWriter]
    names_events: bool = False


_CHAT = _AnswerFormat("chatcmpl-", chat_completion, chat_chunks)
_COMPLETION = _AnswerFormat("cmpl-", completion, completion_chunks)
_RESPONSE = _AnswerFormat("resp_", response, ResponseEvents, names_events=True)


def generation_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["generation"], route_class=_route_class(frontend), **common)

    @router.post(
        "/chat/completions",
        responses=answers(documentation.CHAT_ANSWER, streams=True),
        openapi_extra=request_example(documentation.CHAT_REQUEST),
    )
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        frontend.check_model(body.model)
        prompt = chat_prompt(body, frontend.tokenizer)
        parsing = frontend.message_format.parsing(body.tool_use, prompt)
        return await _answer(frontend, body, request, [prompt], _CHAT, parsing)

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
        parsing = frontend.message_format.parsing(body.tool_use, prompt)
        return await _answer(frontend, body, request, [prompt], _RESPONSE, parsing)

    return router


def _route_class(frontend: FrontendContext) -> type[BodyRoute]:
    if not frontend.options.http.megatron_http:
        return BodyRoute
    return converting_route(partial(from_megatron, served_name=frontend.options.served_name))


async def _answer(
    frontend: FrontendContext,
    body: GenerationBody,
    request: Request,
    prompts: list[list[int]],
    style: _AnswerFormat,
    parsing: ResponseParsing | None = None,
) -> Response:
    salt = frontend.cache_salt(request, body)
    generation = frontend.generation(body, prompts, idempotency_key(request, body), parsing, salt)
    answer = _new_answer(frontend, body, prompts, style, parsing or ResponseParsing(), generation)
    try:
        async with CancelOnDisconnect(request.receive):
            await frontend.admission.admit(generation.size)
            if not body.stream:
                deltas = await _collect(generation)
                return JsonResponse(style.whole(answer, deltas, frontend.tokenizer))
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    chunks = style.chunks(answer, frontend.tokenizer)
    return EventStream(generation.deltas(), chunks, names_events=style.names_events)


def _new_answer(
    frontend: FrontendContext,
    body: GenerationBody,
    prompts: list[list[int]],
    style: _AnswerFormat,
    parsing: ResponseParsing,
    generation: Generation,
) -> Answer:
    """The answer with its id: for Megatron's clients the ``uid`` of its first choice, which is its key in ledgers."""
    if frontend.options.http.megatron_http and generation.first_uuid is not None:
        return Answer(body, prompts, "", parsing, number=generation.first_uuid.hex())
    return Answer(body, prompts, style.id_prefix, parsing)


async def _collect(generation: Generation) -> list[Delta]:
    async with aclosing(generation.deltas()) as deltas:
        return [delta async for arrived in deltas for delta in arrived]

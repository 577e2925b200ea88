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
from megatron_runtime.server.bodies.sampling import truncated
from megatron_runtime.server.body_route import BodyRoute, body_route
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.generation.choice import ChoiceTask, Delta
from megatron_runtime.server.generation.generation import Generation
from megatron_runtime.server.generation.idempotency import IdempotencyKey, idempotency_key
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
    prompts: Callable[[Any, FrontendContext], tuple[list[list[int]], ResponseParsing]]
    """The tokens of every prompt of a body, and how its answers are parsed."""
    whole: Callable[[Answer, Sequence[Delta], Tokenizer], dict[str, Any]]
    chunks: Callable[[Answer, Tokenizer], ChunkWriter]
    names_events: bool = False


def _chat_prompts(body: ChatCompletionBody, frontend: FrontendContext) -> tuple[list[list[int]], ResponseParsing]:
    options, form = frontend.options, frontend.message_format
    trusts = options.http.trust_request_chat_template
    longest = options.max_sequence_length
    prompt = chat_prompt(body, frontend.tokenizer, longest, form.tool_format, trusts_templates=trusts)
    continued = str(body.messages[-1].for_template()["content"]) if body.continue_final_message else None
    return [prompt], form.parsing(body.tool_use, prompt, continued)


def _completion_prompts(body: CompletionBody, frontend: FrontendContext) -> tuple[list[list[int]], ResponseParsing]:
    return completion_prompts(body, frontend.tokenizer, frontend.options.max_sequence_length), ResponseParsing()


def _response_prompts(body: ResponsesBody, frontend: FrontendContext) -> tuple[list[list[int]], ResponseParsing]:
    prompt = render(
        body.messages,
        frontend.tokenizer,
        body.template_variables,
        param="input",
        tools=body.tool_use.for_template(),
        longest=frontend.options.max_sequence_length,
        add_special_tokens=bool(body.add_special_tokens),
        is_truncated=body.truncate_prompt_tokens is not None,
        tool_format=frontend.message_format.tool_format,
    )
    prompt = truncated(prompt, body, frontend.options.max_sequence_length)
    return [prompt], frontend.message_format.parsing(body.tool_use, prompt)


_CHAT = _AnswerFormat("chatcmpl-", _chat_prompts, chat_completion, chat_chunks)
_COMPLETION = _AnswerFormat("cmpl-", _completion_prompts, completion, completion_chunks)
_RESPONSE = _AnswerFormat("resp_", _response_prompts, response, ResponseEvents, names_events=True)


def generation_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["generation"], route_class=_route_class(frontend), **common)

    @router.post(
        "/chat/completions",
        responses=answers(documentation.CHAT_ANSWER, streams=True),
        openapi_extra=request_example(documentation.CHAT_REQUEST),
    )
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        return await _answer(frontend, body, request, _CHAT)

    @router.post(
        "/completions",
        responses=answers(documentation.COMPLETION_ANSWER, streams=True),
        openapi_extra=request_example(documentation.COMPLETION_REQUEST),
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(frontend, body, request, _COMPLETION)

    @router.post(
        "/responses",
        responses=answers(documentation.RESPONSE_ANSWER, streams=True),
        openapi_extra=request_example(documentation.RESPONSE_REQUEST),
    )
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await _answer(frontend, body, request, _RESPONSE)

    return router


def _route_class(frontend: FrontendContext) -> type[BodyRoute]:
    if not frontend.options.http.megatron_http:
        return body_route(frontend.large_bodies)
    return body_route(frontend.large_bodies, partial(from_megatron, served_name=frontend.options.served_name))


@dataclass(frozen=True)
class _Prepared:
    """A request as far as it can be prepared without its connections."""

    prompts: list[list[int]]
    parsing: ResponseParsing
    key: IdempotencyKey | None
    tasks: list[ChoiceTask]


def _prepare(frontend: FrontendContext, body: GenerationBody, request: Request, style: _AnswerFormat) -> _Prepared:
    frontend.check_model(body.model)
    prompts, parsing = style.prompts(body, frontend)
    key = idempotency_key(request, body)
    tasks = frontend.tasks(body, prompts, key, parsing, cache_salt=frontend.cache_salt(request, body))
    return _Prepared(prompts, parsing, key, tasks)


async def _answer(frontend: FrontendContext, body: GenerationBody, request: Request, style: _AnswerFormat) -> Response:
    size = len(await request.body())
    prepared = await frontend.large_bodies.run(size, _prepare, frontend, body, request, style)
    generation = frontend.generation(body, prepared.tasks, prepared.key)
    answer = _new_answer(frontend, body, prepared, style)
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


def _new_answer(frontend: FrontendContext, body: GenerationBody, prepared: _Prepared, style: _AnswerFormat) -> Answer:
    """The answer with its id: for Megatron's clients the ``uid`` of its first choice, which is its key in ledgers."""
    uuid = prepared.tasks[0].uuid
    if frontend.options.http.megatron_http and uuid is not None:
        return Answer(body, prepared.prompts, "", prepared.parsing, number=uuid.hex())
    if body.request_id is not None:
        return Answer(body, prepared.prompts, style.id_prefix, prepared.parsing, number=body.request_id)
    return Answer(body, prepared.prompts, style.id_prefix, prepared.parsing)


async def _collect(generation: Generation) -> list[Delta]:
    async with aclosing(generation.deltas()) as deltas:
        return [delta async for arrived in deltas for delta in arrived]

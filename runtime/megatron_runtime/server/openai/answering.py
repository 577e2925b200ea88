"""Answers a request that generates text: checks, prompts, generation, and the complete or streamed answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.body_route import end_turn
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.generation.choice import ChoiceTask, Delta
from megatron_runtime.server.generation.generation import collect
from megatron_runtime.server.generation.idempotency import IdempotencyKey, idempotency_key
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.openai.answer import Answer
from megatron_runtime.server.openai.streaming import CancelOnDisconnect, ChunkWriter, ClientDisconnected, EventStream
from megatron_runtime.server.request_log import CLIENT_CLOSED_REQUEST


@dataclass(frozen=True)
class AnswerFormat:
    """How an endpoint formats its answers."""

    id_prefix: str
    prompts: Callable[[Any, FrontendContext], tuple[list[list[int]], ResponseParsing]]
    """The tokens of every prompt of a body, and how its answers are parsed."""
    whole: Callable[[Answer, Sequence[Delta], Tokenizer], dict[str, Any]]
    chunks: Callable[[Answer, Tokenizer], ChunkWriter]
    names_events: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A request as far as it can be prepared without its connections."""

    prompts: list[list[int]]
    parsing: ResponseParsing
    key: IdempotencyKey | None
    tasks: list[ChoiceTask]


def _prepare(frontend: FrontendContext, body: GenerationBody, request: Request, style: AnswerFormat) -> _Prepared:
    prompts, parsing = style.prompts(body, frontend)
    key = idempotency_key(request, body)
    tasks = frontend.tasks(body, prompts, key, parsing, isolation=frontend.isolation(request, body.cache_salt))
    return _Prepared(prompts, parsing, key, tasks)


async def answer_request(
    frontend: FrontendContext, body: GenerationBody, request: Request, style: AnswerFormat
) -> Response:
    """The response to a valid body, complete or as a stream.

    Raises:
        ApiError: The request can't be answered.
    """
    await frontend.check_model(body.model)
    size = len(await request.body())
    run = frontend.large_bodies.run_with_grammar if body.has_grammar else frontend.large_bodies.run
    prepared = await run(size, _prepare, frontend, body, request, style)
    end_turn(request)
    generation = frontend.generation(prepared.tasks, prepared.key, timeout=body.timeout)
    answer = _new_answer(frontend, body, prepared, style)
    try:
        async with CancelOnDisconnect(request.receive):
            await frontend.admission.admit(generation.size)
            if not body.stream:
                deltas = await collect(generation)
                return JsonResponse(style.whole(answer, deltas, frontend.tokenizer))
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    chunks = style.chunks(answer, frontend.tokenizer)
    return EventStream(generation.deltas(), chunks, names_events=style.names_events)


def _new_answer(frontend: FrontendContext, body: GenerationBody, prepared: _Prepared, style: AnswerFormat) -> Answer:
    """The answer with its id: for Megatron's clients the ``uid`` of its first choice, which is its key in ledgers."""
    uuid = prepared.tasks[0].uuid
    if frontend.options.http.megatron_http and uuid is not None:
        return Answer(body, prepared.prompts, "", prepared.parsing, number=uuid.hex())
    if body.request_id is not None:
        return Answer(body, prepared.prompts, style.id_prefix, prepared.parsing, number=body.request_id)
    return Answer(body, prepared.prompts, style.id_prefix, prepared.parsing)

"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from megatron_runtime.server import documentation
from megatron_runtime.server.anthropic.error_bodies import error_response
from megatron_runtime.server.anthropic.messages import MessageEvents, message
from megatron_runtime.server.bodies.messages_protocol import CountTokensBody, MessagesBody
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.errors import ErrorResponse
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.messages.conversation import render
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.openai.answering import AnswerFormat, answer_request

_PATH = "/messages"
ERROR_RESPONSES: dict[str, ErrorResponse] = {f"{prefix}{_PATH}": error_response for prefix in ("/v1", "")}
"""The format of the errors by the beginning of the path."""


def message_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["generation"], route_class=frontend.message_route, **common)

    @router.post(
        _PATH,
        responses=answers(documentation.MESSAGE_ANSWER, streams=True),
        openapi_extra=request_example(documentation.MESSAGE_REQUEST),
    )
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await answer_request(frontend, body, request, _MESSAGE)

    @router.post(
        f"{_PATH}/count_tokens",
        responses=answers(documentation.COUNT_TOKENS_ANSWER),
        openapi_extra=request_example(documentation.COUNT_TOKENS_REQUEST),
    )
    async def count_tokens(body: CountTokensBody, request: Request) -> Response:
        await frontend.check_model(body.model)
        size = len(await request.body())
        return JsonResponse({"input_tokens": await frontend.large_bodies.run(size, _count, body, frontend)})

    return router


def _prompts(body: MessagesBody, frontend: FrontendContext) -> tuple[list[list[int]], ResponseParsing]:
    prompt = _prompt(body, frontend, longest=frontend.options.max_sequence_length)
    return [prompt], frontend.message_format.parsing(body.tool_use, prompt)


def _count(body: CountTokensBody, frontend: FrontendContext) -> int:
    return len(_prompt(body, frontend))


def _prompt(body: MessagesBody | CountTokensBody, frontend: FrontendContext, longest: int | None = None) -> list[int]:
    return render(
        body.chat_messages,
        frontend.tokenizer,
        body.template_kwargs,
        param="messages",
        add_generation_prompt=not body.continues_answer,
        continue_final_message=body.continues_answer,
        tools=body.tool_use.for_template(),
        longest=longest,
        tool_format=frontend.message_format.tool_format,
    )


_MESSAGE = AnswerFormat("msg_", _prompts, message, MessageEvents, names_events=True)

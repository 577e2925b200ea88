"""Routes that generate text: chat completions, completions and responses."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from megatron_runtime.server import documentation
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, CompletionBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.bodies.sampling import truncated
from megatron_runtime.server.body_route import BodyRoute, body_route
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.megatron_requests import from_megatron
from megatron_runtime.server.messages.conversation import chat_prompt, render
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.openai.answering import AnswerFormat, answer_request
from megatron_runtime.server.openai.chat import chat_chunks, chat_completion
from megatron_runtime.server.openai.completions import completion, completion_chunks, completion_prompts
from megatron_runtime.server.openai.responses import ResponseEvents, response


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


_CHAT = AnswerFormat("chatcmpl-", _chat_prompts, chat_completion, chat_chunks)
_COMPLETION = AnswerFormat("cmpl-", _completion_prompts, completion, completion_chunks)
_RESPONSE = AnswerFormat("resp_", _response_prompts, response, ResponseEvents, names_events=True)


def generation_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["generation"], route_class=_route_class(frontend), **common)

    @router.post(
        "/chat/completions",
        responses=answers(documentation.CHAT_ANSWER, streams=True),
        openapi_extra=request_example(documentation.CHAT_REQUEST),
    )
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        return await answer_request(frontend, body, request, _CHAT)

    @router.post(
        "/completions",
        responses=answers(documentation.COMPLETION_ANSWER, streams=True),
        openapi_extra=request_example(documentation.COMPLETION_REQUEST),
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer_request(frontend, body, request, _COMPLETION)

    @router.post(
        "/responses",
        responses=answers(documentation.RESPONSE_ANSWER, streams=True),
        openapi_extra=request_example(documentation.RESPONSE_REQUEST),
    )
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await answer_request(frontend, body, request, _RESPONSE)

    return router


def _route_class(frontend: FrontendContext) -> type[BodyRoute]:
    if not frontend.options.http.megatron_http:
        return frontend.message_route
    converted = partial(from_megatron, served_name=frontend.options.served_name)
    return body_route(frontend.large_bodies, lambda body: frontend.without_media(converted(body)))

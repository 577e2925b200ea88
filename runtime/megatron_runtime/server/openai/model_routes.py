"""Routes about the served model and its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from megatron_runtime.server import documentation
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.openai.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    tokenize,
    tokenizer_info,
)

REFRESH_SECONDS = 1.0
"""Time for which the list of models waits for the coordinator, which may be restarting."""


def model_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes of OpenAI's API; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["model"], **common)

    @router.get("/models", responses=answers(documentation.MODELS_ANSWER))
    async def models() -> dict[str, Any]:
        # An adapter may have been loaded or unloaded by way of another server just now.
        await frontend.admission.refresh(REFRESH_SECONDS)
        adapters = [_adapter(frontend, name) for name in frontend.adapters]
        return {"object": "list", "data": [_model(frontend), *adapters]}

    @router.get("/models/{name:path}", responses=answers(documentation.MODEL_ANSWER))
    async def model(name: str) -> dict[str, Any]:
        await frontend.check_model(name)
        return _model(frontend) if frontend.adapter(name) is None else _adapter(frontend, name)

    return router


def token_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """``/tokenize``, ``/detokenize`` and ``/tokenizer_info``; ``common`` as for ``model_routes``."""
    router = APIRouter(tags=["model"], route_class=frontend.message_route, **common)

    @router.post(
        "/tokenize",
        name="tokenize",
        responses=answers(documentation.TOKENIZE_ANSWER),
        openapi_extra=request_example(documentation.TOKENIZE_REQUEST),
    )
    async def to_tokens(body: TokenizeBody, request: Request) -> Response:
        await frontend.check_model(body.model or frontend.options.served_name)
        longest, size = frontend.options.max_sequence_length, len(await request.body())
        form = frontend.message_format.tool_format
        return JsonResponse(await frontend.large_bodies.run(size, tokenize, body, frontend.tokenizer, longest, form))

    @router.post(
        "/detokenize",
        name="detokenize",
        responses=answers(documentation.DETOKENIZE_ANSWER),
        openapi_extra=request_example(documentation.DETOKENIZE_REQUEST),
    )
    async def to_text(body: DetokenizeBody, request: Request) -> Response:
        await frontend.check_model(body.model or frontend.options.served_name)
        size = len(await request.body())
        return JsonResponse(await frontend.large_bodies.run(size, detokenize, body, frontend.tokenizer))

    @router.get("/tokenizer_info", name="tokenizer info", responses=answers(documentation.TOKENIZER_INFO_ANSWER))
    async def info() -> dict[str, Any]:
        return tokenizer_info(frontend.tokenizer, frontend.options.max_sequence_length)

    return router


def _model(frontend: FrontendContext) -> dict[str, Any]:
    return {
        "id": frontend.options.served_name,
        "object": "model",
        "created": frontend.started,
        "owned_by": "megatron",
        "max_model_len": frontend.options.max_sequence_length,
    }


def _adapter(frontend: FrontendContext, name: str) -> dict[str, Any]:
    """As vLLM describes it."""
    return {**_model(frontend), "id": name, "root": frontend.adapters[name], "parent": frontend.options.served_name}

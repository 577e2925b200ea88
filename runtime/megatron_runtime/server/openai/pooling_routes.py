"""``POST /v1/embeddings`` and ``POST /v1/score``."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from megatron_runtime.server import documentation
from megatron_runtime.server.bodies.pooling_protocol import EmbeddingsBody, PoolingBody, ScoreBody
from megatron_runtime.server.body_route import body_route
from megatron_runtime.server.documentation import answers, request_example
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.openai.pooling import PooledPrompts, answer_pooling

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORTEST = 1e-12
"""Divisor of shorter vectors, as in PyTorch's ``normalize``."""


def pooling_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` are arguments for APIRouter."""
    router = APIRouter(tags=["pooling"], route_class=body_route(frontend.large_bodies), **common)

    @router.post(
        "/embeddings",
        responses=answers(documentation.EMBEDDINGS_ANSWER),
        openapi_extra=request_example(documentation.EMBEDDINGS_REQUEST),
    )
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        await frontend.check_model(body.model)
        _check_dimensions(body)
        inputs = [("input", value) for value in body.inputs]
        return await answer_pooling(frontend, body, request, inputs, lambda pooled: _embeddings(body, pooled))

    @router.post(
        "/score",
        responses=answers(documentation.SCORE_ANSWER),
        openapi_extra=request_example(documentation.SCORE_REQUEST),
    )
    async def score(body: ScoreBody, request: Request) -> Response:
        inputs = [(name, text) for name, texts in body.sides for text in texts]
        return await answer_pooling(frontend, body, request, inputs, lambda pooled: _scores(body, pooled))

    return router


def _check_dimensions(body: EmbeddingsBody) -> None:
    if body.dimensions is not None:
        message = (
            f"dimensions: {body.model!r} does not support matryoshka representation, changing output dimensions will "
            "lead to poor results; leave it out"
        )
        raise ApiError(400, message, param="dimensions")


def _embeddings(body: EmbeddingsBody, pooled: PooledPrompts) -> dict[str, Any]:
    vectors = _matrix(pooled.states)
    vectors = (_normalized(vectors) if body.use_activation else vectors).astype("<f4")
    encoded = [_base64(vector) for vector in vectors] if body.encoding_format == "base64" else vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
    return _answer(body, "embd-", data, pooled)


def _scores(body: ScoreBody, pooled: PooledPrompts) -> dict[str, Any]:
    """Cosine similarities; a single first text is compared with each of the second ones."""
    vectors = _normalized(_matrix(pooled.states))
    count = len(body.sides[0][1])
    values = (vectors[:count] * vectors[count:]).sum(axis=1)
    data = [{"object": "score", "index": index, "score": each} for index, each in enumerate(values.tolist())]
    return _answer(body, "score-", data, pooled)


def _answer(body: PoolingBody, prefix: str, data: list[dict[str, Any]], pooled: PooledPrompts) -> dict[str, Any]:
    return {
        "id": f"{prefix}{body.request_id or secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": pooled.usage(),
    }


def _matrix(states: Sequence[Sequence[float]]) -> NDArray[Any]:
    """float64 [inputs, hidden size]."""
    import numpy as np  # imported here: most frontends never need it

    return np.array(states, dtype=np.float64)


def _normalized(vectors: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[Any] = vectors / np.maximum(lengths, _SHORTEST)
    return unit


def _base64(vector: NDArray[Any]) -> str:
    return base64.b64encode(vector.tobytes()).decode()

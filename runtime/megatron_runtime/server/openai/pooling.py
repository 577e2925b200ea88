"""Requests for embeddings and scores: from their inputs to the pooled hidden states of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.bodies.pooling_protocol import PoolingBody, PoolingInput
from megatron_runtime.server.bodies.sampling import check_characters, check_tokens, check_truncatable, check_truncation
from megatron_runtime.server.body_route import end_turn
from megatron_runtime.server.errors import CONTEXT_EXCEEDED, ApiError, context_length
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.generation.choice import ChoiceTask, Delta
from megatron_runtime.server.generation.generation import collect
from megatron_runtime.server.generation.idempotency import IdempotencyKey, idempotency_key
from megatron_runtime.server.isolation import Isolation
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.openai.streaming import CancelOnDisconnect, ClientDisconnected
from megatron_runtime.server.request_log import CLIENT_CLOSED_REQUEST

Inputs = Sequence[tuple[str, PoolingInput]]
"""The inputs of a request, each with the name of its field."""


@dataclass(frozen=True)
class PooledPrompts:
    """The tokens of the inputs, and the last delta of each, in the order of the inputs."""

    prompts: list[list[int]]
    deltas: list[Delta]

    @property
    def states(self) -> list[Sequence[float]]:
        """[inputs][hidden size], not normalized."""
        return [delta.embedding for delta in self.deltas if delta.embedding is not None]

    def usage(self) -> dict[str, Any]:
        """The ``usage`` of the answer."""
        tokens = sum(map(len, self.prompts))
        cached = sum(delta.cached_tokens for delta in self.deltas)
        return {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def answer_pooling(
    frontend: FrontendContext,
    body: PoolingBody,
    request: Request,
    inputs: Inputs,
    whole: Callable[[PooledPrompts], dict[str, Any]],
) -> Response:
    """The response to a valid body, which ``whole`` makes of the hidden states.

    Raises:
        ApiError: The request can't be answered.
    """
    await frontend.check_model(body.model)
    size = len(await request.body())
    key = idempotency_key(request, body)
    isolation = frontend.isolation(request, body.cache_salt)
    prompts, tasks = await frontend.large_bodies.run(size, _prepare, frontend, body, inputs, key, isolation)
    end_turn(request)
    generation = frontend.generation(tasks, key, timeout=body.timeout)
    try:
        async with CancelOnDisconnect(request.receive):
            await frontend.admission.admit(generation.size)
            deltas = sorted(await collect(generation), key=lambda delta: delta.choice)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    pooled = PooledPrompts(prompts, deltas)
    values = sum(len(delta.embedding or ()) for delta in deltas)
    return await frontend.large_bodies.run(values, lambda: JsonResponse(whole(pooled)))


def _prepare(
    frontend: FrontendContext, body: PoolingBody, inputs: Inputs, key: IdempotencyKey | None, isolation: Isolation
) -> tuple[list[list[int]], list[ChoiceTask]]:
    if not inputs:
        raise ApiError(400, "input: must not be empty", param="input")
    longest, tokenizer = frontend.options.max_sequence_length, frontend.tokenizer
    prompts = [input_tokens(param, value, body, tokenizer, longest) for param, value in inputs]
    try:
        params = SamplingParams(
            temperature=0,
            num_tokens_to_generate=0,
            pooling=frontend.options.http.pooling,
            priority=body.priority,
            adapter=frontend.adapter(body.model),
        )
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param=error.field) from error
    isolation.apply([params], len(prompts))
    return prompts, [
        ChoiceTask(index, prompt, params, uuid=None if key is None else key.uuid(index))
        for index, prompt in enumerate(prompts)
    ]


def input_tokens(param: str, value: PoolingInput, body: PoolingBody, tokenizer: Tokenizer, longest: int) -> list[int]:
    """The tokens of one input. Raises ApiError 400 for an input that is empty, invalid or too long."""
    kept = body.truncate_prompt_tokens
    if kept is not None:
        check_truncation(kept, longest)
    if isinstance(value, str):
        tokens = _text_tokens(param, value, body, tokenizer, longest)
    else:
        check_tokens(value, tokenizer.vocab_size, param=param)
        tokens = value if kept is None else _kept(value, longest if kept == -1 else kept, body)
    if not tokens:
        raise ApiError(400, f"{param}: must not be empty", param=param)
    if len(tokens) > longest:
        message = f"{param}: {len(tokens)} tokens can't fit. {context_length(longest)} {CONTEXT_EXCEEDED}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return tokens


def _text_tokens(param: str, text: str, body: PoolingBody, tokenizer: Tokenizer, longest: int) -> list[int]:
    """The tokens of a text. Truncation keeps the special tokens around it, as in Hugging Face's tokenizers."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        check_characters(text, tokenizer, longest, param=param)
        return tokenizer.tokenize(text, add_special_tokens=body.add_special_tokens)
    check_truncatable(text, param=param)
    count = longest if kept == -1 else kept
    tokens = tokenizer.tokenize(text, add_special_tokens=body.add_special_tokens)
    if len(tokens) <= count:
        return tokens
    plain = tokenizer.tokenize(text, add_special_tokens=False)
    added = len(tokens) - len(plain)
    if count <= added:
        message = (
            f"truncate_prompt_tokens: {count} leaves no token of the text beside {added} special ones; increase it"
        )
        raise ApiError(400, message, param="truncate_prompt_tokens")
    begin = next(start for start in range(added + 1) if tokens[start : start + len(plain)] == plain)
    return [*tokens[:begin], *_kept(plain, count - added, body), *tokens[begin + len(plain) :]]


def _kept(tokens: list[int], count: int, body: PoolingBody) -> list[int]:
    """At most ``count`` tokens, of the side that is not truncated."""
    if len(tokens) <= count:
        return tokens
    return tokens[:count] if body.truncation_side == "right" else tokens[len(tokens) - count :]

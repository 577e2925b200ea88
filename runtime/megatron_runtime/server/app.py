"""The OpenAI endpoint as an ASGI app."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.admission import Admission
from megatron_runtime.server.answer import Answer
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.chat import chat_chunks, chat_completion, chat_prompt
from megatron_runtime.server.choice import ChoiceRunner, ChoiceTask, Delta
from megatron_runtime.server.completions import completion, completion_chunks, completion_prompts
from megatron_runtime.server.errors import ApiError, install_error_handlers
from megatron_runtime.server.generation import Generation
from megatron_runtime.server.limits import BodyLimit, CountRequests
from megatron_runtime.server.metrics import FrontendMetrics
from megatron_runtime.server.options import FrontendOptions
from megatron_runtime.server.protocol import MAX_CHOICES, ChatCompletionBody, CompletionBody
from megatron_runtime.server.repetition import RequestName, already_running, request_name
from megatron_runtime.server.sampling import sampling_params, token_limit
from megatron_runtime.server.streaming import ClientLeft, EventStream, unless_client_leaves

CLIENT_CLOSED_REQUEST = 499
"""nginx's code for the log and the metrics; nobody is left to read the answer."""

Complete = Callable[[Answer, Sequence[Delta], Tokenizer], dict[str, Any]]
Chunks = Callable[..., AsyncGenerator[dict[str, Any], None]]


@dataclass(frozen=True)
class Frontend:
    """The parts that the routes work with."""

    options: FrontendOptions
    client: InferenceClient
    tokenizer: Tokenizer
    admission: Admission
    api_keys: ApiKeys | None = None
    metrics: FrontendMetrics = field(default_factory=FrontendMetrics)
    started: int = field(default_factory=lambda: int(time.time()))

    def check_key(self, request: Request) -> None:
        """Raises ApiError 401 when keys are asked for and the request has none of them."""
        if self.api_keys is not None:
            self.api_keys.check(request.headers.get("authorization"))

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for another model than the served one."""
        if name != self.options.served_name:
            message = f"model: {name!r} is not served here; the served one is {self.options.served_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def generation(
        self, body: ChatCompletionBody | CompletionBody, prompts: list[list[int]], name: RequestName | None = None
    ) -> Generation:
        """The choices that ``body`` asks for: ``n`` for every prompt, in the order of the prompts."""
        if len(prompts) * body.n > MAX_CHOICES:
            message = f"n: {len(prompts)} prompts times {body.n} are more than {MAX_CHOICES} answers"
            raise ApiError(400, message, param="n")
        tasks = [
            self._task(index * body.n + sample, prompt, self._sampling_params(body, prompt, sample), name)
            for index, prompt in enumerate(prompts)
            for sample in range(body.n)
        ]
        if name is not None:
            running = {future.request_uuid for future in self.client.completion_futures.values()}
            if any(task.uuid in running for task in tasks):
                raise already_running()
        runner = ChoiceRunner(self.client, self.tokenizer, self.metrics)
        return Generation(runner, tasks, timeout=self.options.request_timeout, admission=self.admission)

    @staticmethod
    def _task(index: int, prompt: list[int], params: SamplingParams, name: RequestName | None) -> ChoiceTask:
        if name is None:
            return ChoiceTask(index, prompt, params)
        if params.seed is None:
            params.seed = name.seed(index)
        return ChoiceTask(index, prompt, params, uuid=name.uuid(index))

    def _sampling_params(
        self, body: ChatCompletionBody | CompletionBody, prompt: list[int], sample: int
    ) -> SamplingParams:
        limit = self._limit(body, prompt)
        return sampling_params(body, sample=sample, limit=limit, vocab_size=self.tokenizer.vocab_size)

    def _limit(self, body: ChatCompletionBody | CompletionBody, prompt: list[int]) -> int:
        longest = self.options.max_sequence_length
        if isinstance(body, CompletionBody):
            return token_limit(len(prompt), body.max_tokens, longest, param="max_tokens", prompt_param="prompt")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        return token_limit(len(prompt), body.token_limit, longest, param=param, prompt_param="messages")


def create_app(frontend: Frontend) -> FastAPI:
    """The app; starts and ends the admission's watch with its lifespan. The client must be started by then."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        frontend.admission.start()
        yield
        await frontend.admission.stop()

    app = FastAPI(title="Megatron inference", lifespan=lifespan)
    install_error_handlers(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(CountRequests, metrics=frontend.metrics)
    guarded = [Depends(frontend.check_key)]
    _add_probes(app, frontend)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(frontend)]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> dict[str, Any]:
        frontend.check_model(name)
        return _model(frontend)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        frontend.check_model(body.model)
        prompts = [chat_prompt(body, frontend.tokenizer)]
        return await _answer(frontend, body, request, prompts, "chatcmpl", chat_completion, chat_chunks)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        frontend.check_model(body.model)
        prompts = completion_prompts(body, frontend.tokenizer)
        return await _answer(frontend, body, request, prompts, "cmpl", completion, completion_chunks)

    return app


async def _answer(
    frontend: Frontend,
    body: ChatCompletionBody | CompletionBody,
    request: Request,
    prompts: list[list[int]],
    id_prefix: str,
    complete: Complete,
    chunks: Chunks,
) -> Response:
    generation = frontend.generation(body, prompts, request_name(request, body))
    answer = Answer(body.model, sum(map(len, prompts)), id_prefix, choices_per_prompt=body.n)
    try:
        await unless_client_leaves(request, frontend.admission.admit())
        if body.stream:
            choices = len(prompts) * body.n
            return EventStream(
                chunks(
                    answer, generation.deltas(), frontend.tokenizer, choices=choices, include_usage=body.include_usage
                )
            )
        deltas = await unless_client_leaves(request, _collect(generation))
    except ClientLeft:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(complete(answer, deltas, frontend.tokenizer))


async def _collect(generation: Generation) -> list[Delta]:
    async with aclosing(generation.deltas()) as deltas:
        return [delta async for delta in deltas]


def _model(frontend: Frontend) -> dict[str, Any]:
    return {
        "id": frontend.options.served_name,
        "object": "model",
        "created": frontend.started,
        "owned_by": "megatron",
        "max_model_len": frontend.options.max_sequence_length,
    }


def _add_probes(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        is_ready = frontend.admission.is_ready
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

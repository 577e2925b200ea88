"""The objects that the routes of a frontend share."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import uuid4

from fastapi import Request

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.api_keys import ApiKeys, digest
from megatron_runtime.server.bodies.guided import output_constraint
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.bodies.sampling import (
    check_choices,
    check_copies,
    sample_seed,
    sampling_params,
    token_limit,
)
from megatron_runtime.server.body_route import BodyRoute, body_route
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import ChoiceTask
from megatron_runtime.server.generation.choice_run import ChoiceRunner
from megatron_runtime.server.generation.generation import Generation
from megatron_runtime.server.generation.idempotency import IdempotencyKey, already_running
from megatron_runtime.server.generation_config import LONGEST_ANSWER, fill
from megatron_runtime.server.isolation import Isolation
from megatron_runtime.server.large_bodies import LargeBodies
from megatron_runtime.server.media_placeholders import replace_media
from megatron_runtime.server.messages.message_format import MessageFormat, ResponseParsing
from megatron_runtime.server.metrics import FrontendMetrics
from megatron_runtime.server.options import FrontendOptions


@dataclass(frozen=True)
class FrontendContext:
    """The components of a frontend, and the checks that its routes share."""

    options: FrontendOptions
    client: InferenceClient
    tokenizer: Tokenizer
    admission: AdmissionController
    api_keys: ApiKeys | None = None
    control_token_digest: str | None = None
    """Digest of the secret for the routes that control the service, in hexadecimal; None disables them."""
    metrics: FrontendMetrics = field(default_factory=FrontendMetrics)
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def message_format(self) -> MessageFormat:
        """The format of the model's messages."""
        return MessageFormat(self.tokenizer, self.options.http.parsers)

    @property
    def message_route(self) -> type[BodyRoute]:
        """The class of routes whose bodies have messages."""
        return body_route(self.large_bodies, self.without_media)

    def without_media(self, body: Any) -> Any:
        """The body with texts in place of media, if they are not refused."""
        return replace_media(body) if self.options.http.media_placeholder else body

    async def check_key(self, request: Request) -> None:
        """Raises ApiError 401 when API keys are configured and the request has none of them.

        A coroutine although it awaits nothing: FastAPI calls plain functions in a thread, which is slower.
        """
        if self.api_keys is not None:
            self.api_keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))

    async def check_control_token(self, request: Request) -> None:
        """Raises ApiError unless the request has the control token, which the control API accepts too."""
        if self.control_token_digest is None:
            message = "this server has no control token; start it with --control-token-file to use this path"
            raise ApiError(403, message, code="no_control_token")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(digest(given).hex(), self.control_token_digest):
            message = "send the control token as Authorization: Bearer <token>"
            raise ApiError(401, message, code="invalid_control_token")

    def isolation(self, request: Request, salt: str | None) -> Isolation:
        """The request's tenant is its API key. The salt of its prefixes is that of its field, and of its API key
        unless keys share their prefixes.
        """
        if self.api_keys is None:
            return Isolation(salt, None)
        names = self.api_keys.names(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if not self.options.http.shared_prefix_cache:
            salt = hashlib.sha256(f"{names.cache_salt}/{salt or ''}".encode()).hexdigest()
        return Isolation(salt, names.tenant)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Names and paths of the adapters that requests can name as their model."""
        known = self.admission.adapters
        return self.options.lora_modules if known is None else known

    async def check_model(self, name: str) -> None:
        """Raises ApiError 404 unless ``name`` is the served model or an adapter, or Megatron's clients are served."""
        if name == self.options.served_name or name in self.adapters or self.options.http.megatron_http:
            return
        await self.admission.refresh()  # An adapter may have been loaded by way of another server.
        if name not in self.adapters:
            served = ", ".join(map(repr, (self.options.served_name, *self.adapters)))
            message = f"model: {name!r} is not served here; the served model is {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter(self, name: str) -> str | None:
        """The adapter that a model's name means; None for the base model."""
        return name if name != self.options.served_name and name in self.adapters else None

    def tasks(
        self,
        body: GenerationBody,
        prompts: list[list[int]],
        key: IdempotencyKey | None,
        parsing: ResponseParsing,
        *,
        isolation: Isolation,
    ) -> list[ChoiceTask]:
        """The choices that ``body`` requests: ``n`` per prompt, in the order of the prompts. Thread-safe."""
        check_choices(body, len(prompts))
        check_copies(body, len(prompts) * body.n)
        fill(body, self.options.sampling_defaults)
        grammar = parsing.grammar(output_constraint(body))
        limits = [self._limit(body, prompt) for prompt in prompts]
        params = {limit: self._sampling_params(body, limit, grammar, parsing) for limit in dict.fromkeys(limits)}
        isolation.apply(params.values(), len(prompts) * body.n)
        return [
            self._task(index * body.n + sample, prompt, params[limit], body, key, parsing)
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            for sample in range(body.n)
        ]

    def generation(self, tasks: list[ChoiceTask], key: IdempotencyKey | None, *, timeout: float | None) -> Generation:
        """Runs the choices of a request, which ends after ``timeout`` seconds or the server's limit.

        Raises:
            ApiError: 409 if a request with the same key is running.
        """
        if key is not None:
            running = {future.request_uuid for future in self.client.completion_futures.values()}
            if any(task.uuid in running for task in tasks):
                raise already_running()
        runner = ChoiceRunner(self.client, self.tokenizer, self.metrics)
        longest = self.options.request_timeout
        limit = longest if timeout is None else min(timeout, longest)
        return Generation(runner, tasks, timeout=limit, admission=self.admission)

    def _task(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        body: GenerationBody,
        key: IdempotencyKey | None,
        parsing: ResponseParsing,
    ) -> ChoiceTask:
        seed = sample_seed(body, index % body.n)
        return ChoiceTask(
            index,
            prompt,
            params,
            seed=key.seed(index) if key is not None and seed is None else seed,
            shares_body=body.n > 1,
            uuid=self._uuid(index, key),
            with_every_token=body.is_echoed or body.return_token_ids or body.return_tokenized_data,
            shown=parsing.shown_tokens,
            top_n=body.top_n_log_probs,
        )

    def _uuid(self, index: int, key: IdempotencyKey | None) -> bytes | None:
        """The UUID of a choice if it is known here: Megatron's answers have it as their id."""
        if key is not None:
            return key.uuid(index)
        return uuid4().bytes if self.options.http.megatron_http else None

    def _limit(self, body: GenerationBody, prompt: list[int]) -> int:
        """Maximum number of tokens to generate after this prompt."""
        limit = token_limit(
            len(prompt),
            body.token_limit,
            self.options.max_sequence_length,
            param=body.limit_param,
            prompt_param=body.prompt_param,
            is_clamped=self.options.http.megatron_http or body.clamps_token_limit,
        )
        longest: int = self.options.sampling_defaults.get(LONGEST_ANSWER, limit)
        return min(limit, longest)

    def _sampling_params(
        self,
        body: GenerationBody,
        limit: int,
        grammar: str | None,
        parsing: ResponseParsing,
    ) -> SamplingParams:
        """The parameters that all choices with this limit share."""
        params = sampling_params(body, limit=limit, vocab_size=self.tokenizer.vocab_size, grammar=grammar)
        params.adapter = self.adapter(body.model)
        parsing.limit_thinking(params, body.thinking_budget)
        return params

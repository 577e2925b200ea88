"""Routes with vLLM's names that load and unload LoRA adapters while the service runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from megatron_runtime.errors import AdapterNotFoundError, CheckpointError, InvalidRequestError
from megatron_runtime.sampling_params import LONGEST_NAME
from megatron_runtime.server.body_route import body_route
from megatron_runtime.server.control_requests import control
from megatron_runtime.server.documentation import answers
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.frontend_context import FrontendContext

LOAD_SECONDS = 120.0
MAX_BODY_BYTES = 64 * 2**10
_ERRORS = {status: answer for status, answer in answers({}).items() if status != 200}


class UnloadAdapterBody(BaseModel):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=LONGEST_NAME)
    lora_int_id: int | None = None
    """Has no effect: adapters are identified by their names."""


class LoadAdapterBody(BaseModel):
    """The body of ``/v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=LONGEST_NAME)
    lora_path: str = Field(min_length=1, max_length=4096)
    """A folder that every rank can read, with the files of peft's ``save_pretrained``."""
    load_inplace: bool = False
    """Whether an adapter of this name is replaced."""


def adapter_routes(frontend: FrontendContext) -> APIRouter:
    """The routes, which need the control token."""
    route = body_route(frontend.large_bodies, max_bytes=MAX_BODY_BYTES)
    guarded = [Depends(frontend.check_control_token)]
    router = APIRouter(tags=["management"], dependencies=guarded, route_class=route)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
    async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> Response:
        name = body.lora_name
        if name == frontend.options.served_name:
            message = f"lora_name: {name!r} is the name of the model itself; choose another one"
            raise ApiError(400, message, param="lora_name")
        load = partial(frontend.client.load_adapter, name, body.lora_path, LOAD_SECONDS, replaces=body.load_inplace)
        await done(request, load)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)
    async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> Response:
        await done(request, partial(frontend.client.unload_adapter, body.lora_name, LOAD_SECONDS))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def done(request: Request, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await control(request, act)
        except AdapterNotFoundError as error:
            raise ApiError(404, f"lora_name: {error}", param="lora_name", code="adapter_not_found") from error
        except InvalidRequestError as error:
            raise ApiError(400, f"lora_name: {error}", param="lora_name") from error
        except CheckpointError as error:
            raise ApiError(400, f"lora_path: {error}", param="lora_path", code="invalid_adapter") from error

    return router

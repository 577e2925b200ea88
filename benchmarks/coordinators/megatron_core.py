"""Megatron Core's coordinator and client, with simulated engines."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgpack
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams

from coordinators.engines import Frames, serve_engines
from coordinators.processes import start_processes
from coordinators.protocol import CoordinatorSetup, serve

MAX_REQUESTS = 256


class NullTokenizer:
    """Does nothing: Megatron's coordinator detokenizes, ours does not."""

    eod = 0

    def detokenize(self, _tokens: list[int]) -> str:
        return "text"


class MegatronEngine:
    """An engine that sends one reply message for all new requests."""

    def __init__(self) -> None:
        self._reply = DynamicInferenceRequest(
            request_id=0, sampling_params=SamplingParams(), status=Status.COMPLETED
        ).serialize()

    def step(self, messages: list[Frames]) -> list[Frames]:
        if not messages:
            return []
        replies = [self._answer(*msgpack.unpackb(message)[1:]) for (message,) in messages]
        return [[msgpack.packb([Headers.ENGINE_REPLY.value, replies])]]

    def _answer(self, request_id: int, prompt: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        tokens = list(range(1, 1 + sampling_params["num_tokens_to_generate"]))
        known = {"request_id": request_id, "prompt_length": len(prompt), "generated_tokens": tokens}
        return self._reply | known | {"sampling_params": sampling_params}


class MegatronDeployment:
    """Megatron's coordinator with engines and a client. Its releases have no message for single tokens."""

    def __init__(self, coordinator: int, address: str) -> None:
        self.coordinator = coordinator
        self._client = InferenceClient(address)
        self._client.start(asyncio.get_running_loop())

    async def ask(self, prompt: list[int], answer_tokens: int) -> int:
        params = SamplingParams(num_tokens_to_generate=answer_tokens)
        return len((await self._client.add_request(prompt, params))["generated_tokens"])


async def deploy(setup: CoordinatorSetup, prefix_routing: bool) -> MegatronDeployment:
    """Starts the coordinator by its own entry point; returns once the engines have registered."""
    coordinator, address = await start_processes(
        DataParallelInferenceCoordinator.entrypoint,
        setup.engines,
        NullTokenizer(),
        MAX_REQUESTS,
        work=partial(serve_engines, MegatronEngine, engines=setup.engines),
        hostname="127.0.0.1",
        block_size_tokens=setup.block_size,
        enable_prefix_caching=prefix_routing,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
    )
    return MegatronDeployment(coordinator, address)


if __name__ == "__main__":
    serve(deploy, "megatron-core", "torch", "pyzmq", "msgpack")

"""Our coordinator and client, with engines that send the messages of our engine loop."""

from __future__ import annotations

import asyncio
from functools import partial

from coordinators.engines import STEP_SECONDS
from coordinators.processes import start_processes
from coordinators.protocol import CoordinatorSetup, serve
from megatron_runtime.config import PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.engine.worker.coordinator_connection import CoordinatorConnection
from megatron_runtime.engine.worker.loop_requests import LoopRequest
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.inference_request import DynamicInferenceRequest, Status
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.batches import with_bodies
from megatron_runtime.wire.bodies import TokenChunk
from megatron_runtime.wire.codec import Message, pack_body, unpack_body
from megatron_runtime.wire.items import Assignment, EngineLoad, items

TIMEOUT_SECONDS = 3600.0
"""Timeout of heartbeats, in seconds: contenders that wait for their turn are stopped and must not time out."""


class SimulatedEngine:
    """An engine that sends one reply message for all requests of a message, and streams token by token."""

    def __init__(self, address: str, group: int, text_of_token: str) -> None:
        self._text_of_token = text_of_token
        self._reply = DynamicInferenceRequest(
            request_id=0, generated_text="", sampling_params=SamplingParams(), status=Status.COMPLETED
        ).serialize()
        self._streams: list[tuple[LoopRequest, int]] = []
        self._link = CoordinatorConnection(
            address,
            replica_group=group,
            attempt=0,
            key=None,
            describe=lambda: (EngineState.RUNNING, False, [], EngineLoad(), ""),
            on_message=self._receive,
            on_registering=lambda: None,
            on_refused=print,
        )

    async def work(self) -> None:
        self._link.open()
        while True:
            await asyncio.sleep(STEP_SECONDS)
            self._step()

    def _receive(self, message: Message) -> None:
        if message.header is not Headers.SUBMIT_REQUEST:
            return
        finished, missing = [], []
        for assignment, body in with_bodies(items(message, Assignment.parse), message.bodies):
            if assignment.withheld:
                missing.append(assignment.uuid)
                continue
            wanted = unpack_body(body)[1]["num_tokens_to_generate"]
            request = LoopRequest(assignment.uuid, 0, assignment.dispatch, SamplingParams(), TokenChunk())
            if assignment.streaming:
                self._streams.append((request, wanted))
            else:
                finished.append(self._finish(request, list(range(wanted))))
        self._link.send_replies(finished)
        if missing:
            self._link.ask_for_bodies(missing)

    def _step(self) -> None:
        for request, _ in self._streams:
            request.made.tokens.append(1)
        going_on = [(request, wanted) for request, wanted in self._streams if len(request.made.tokens) < wanted]
        ended = [request for request, wanted in self._streams if len(request.made.tokens) >= wanted]
        self._streams = going_on
        self._link.send_progress([(request, len(request.made.tokens) - 1, TokenChunk([1])) for request, _ in going_on])
        self._link.send_replies([self._finish(request, request.made.tokens) for request in ended])

    def _finish(self, request: LoopRequest, tokens: list[int]) -> LoopRequest:
        text = self._text_of_token * len(tokens)
        request.reply = pack_body(self._reply | {"generated_tokens": tokens, "generated_text": text})
        return request


def serve_engines(address: str, engines: int, text_of_token: str = "text") -> None:
    """Runs all engines in this process; streams repeat token 1."""

    async def work() -> None:
        await asyncio.gather(*(SimulatedEngine(address, group, text_of_token).work() for group in range(engines)))

    asyncio.run(work())


class OurDeployment:
    """Our coordinator with engines and a client."""

    def __init__(self, coordinator: int, client: InferenceClient) -> None:
        self.coordinator = coordinator
        self._client = client

    async def ask(self, prompt: list[int], answer_tokens: int) -> int:
        params = SamplingParams(num_tokens_to_generate=answer_tokens)
        return len((await self._client.add_request(prompt, params))["generated_tokens"])

    async def stream(self, prompt: list[int], answer_tokens: int) -> int:
        params = SamplingParams(num_tokens_to_generate=answer_tokens)
        return sum([len(update.new_tokens) async for update in self._client.stream_request(prompt, params)])


async def deploy(setup: CoordinatorSetup, prefix_routing: bool) -> OurDeployment:
    """Starts the coordinator by our entry point; returns once all engines have registered."""
    coordinator, address = await start_processes(
        DataParallelInferenceCoordinator.entrypoint,
        setup.engines,
        work=partial(serve_engines, engines=setup.engines),
        block_size_tokens=setup.block_size,
        enable_prefix_caching=prefix_routing,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        engine_timeout=TIMEOUT_SECONDS,
    )
    client = InferenceClient(address, deserialize=False, coordinator_timeout=TIMEOUT_SECONDS)
    await client.start()
    state = await client.service_state()
    while sum(engine.ready for engine in state.engines) < setup.engines:
        state = await client.wait_for_state_change(state.revision, TIMEOUT_SECONDS)
    return OurDeployment(coordinator, client)


if __name__ == "__main__":
    serve(deploy, "megatron-inference", "pyzmq", "msgpack")

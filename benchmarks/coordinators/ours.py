"""Our coordinator and client; the engines are our coordinated loop around something that makes up its tokens."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import Any

from coordinators.engines import STEP_SECONDS
from coordinators.protocol import Setup, serve
from megatron_runtime.config import PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.engine.coordinated_loop import CoordinatedLoop
from megatron_runtime.engine.step_result import EngineStats, PartialOutput
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron_runtime.sampling_params import SamplingParams

PATIENT = 3600.0
"""Who has no turn is stopped; nobody must take that for its end."""


class Engine:
    """Whole answers in one step; streams token by token."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._records: dict[int, DynamicInferenceRequestRecord] = {}
        self._streaming: set[int] = set()

    def add_request(self, request_id: int, _prompt: Any, sampling_params: SamplingParams | None, **_: Any) -> None:
        assert sampling_params is not None
        assert sampling_params.num_tokens_to_generate is not None
        request = DynamicInferenceRequest(request_id=request_id, sampling_params=sampling_params)
        self._records[request_id] = DynamicInferenceRequestRecord.from_request(request)
        self._left[request_id] = sampling_params.num_tokens_to_generate
        if sampling_params.streaming_interval == 1:
            self._streaming.add(request_id)

    def step_modern(self) -> dict[str, Any]:
        if self._streaming:
            time.sleep(STEP_SECONDS)
        partials = {}
        for request_id, left in list(self._left.items()):
            tokens = [1] if request_id in self._streaming else list(range(left))
            partials[request_id] = PartialOutput(request_id, tokens, None, None)
            self._records[request_id][0].generated_tokens += tokens
            self._left[request_id] = left - len(tokens)
        finished = [self._end(request_id) for request_id, left in list(self._left.items()) if not left]
        return {"finished_request_records": finished, "partial_outputs": partials}

    def _end(self, request_id: int) -> DynamicInferenceRequestRecord:
        del self._left[request_id]
        self._streaming.discard(request_id)
        record = self._records.pop(request_id)
        record[0].generated_text, record[0].status = "text", Status.COMPLETED
        return record

    def abort_request(self, _request_id: int) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def take_reports(self) -> tuple[list[Any], dict[int, Any]]:
        return [], {}

    def stats(self) -> EngineStats:
        return EngineStats(len(self._left), 0, 0, 0, 0, 0, 0)

    def fail_all_requests(self, error: Exception) -> None:
        raise error

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


def serve_engines(address: str, engines: int) -> None:
    """All engines in this process."""

    async def work() -> None:
        loops = [CoordinatedLoop(Engine(), coordinator_address=address, data_parallel_rank=i) for i in range(engines)]
        await asyncio.gather(*(loop.run() for loop in loops))

    asyncio.run(work())


class OurStand:
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


async def open_stand(setup: Setup, prefix_routing: bool) -> OurStand:
    """Our own entry point, and all engines registered."""
    spawn = multiprocessing.get_context("spawn")
    (here, there), ready = spawn.Pipe(), spawn.Event()
    options = {
        "block_size_tokens": setup.block_size,
        "enable_prefix_caching": prefix_routing,
        "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        "engine_timeout": PATIENT,
    }
    entry = DataParallelInferenceCoordinator.entrypoint
    coordinator = spawn.Process(target=entry, args=(there, ready, setup.engines), kwargs=options, daemon=True)
    coordinator.start()
    address = await asyncio.to_thread(here.recv)
    spawn.Process(target=serve_engines, args=(address, setup.engines), daemon=True).start()
    client = InferenceClient(address, deserialize=False, coordinator_timeout=PATIENT)
    await client.start()
    state = await client.service_state()
    while sum(engine.ready for engine in state.engines) < setup.engines:
        state = await client.wait_for_state_change(state.revision, PATIENT)
    assert coordinator.pid
    return OurStand(coordinator.pid, client)


if __name__ == "__main__":
    serve(open_stand, "megatron-inference", "pyzmq", "msgpack")

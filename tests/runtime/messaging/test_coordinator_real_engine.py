"""The coordinator with a real engine: failures change no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from messaging_support.fleet import Fleet, until

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,", "The sun is"]
PARAMS = [
    SamplingParams(temperature=0, num_tokens_to_generate=400, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=11, num_tokens_to_generate=400, ignore_eos=True),
    SamplingParams(temperature=0, num_tokens_to_generate=400, ignore_eos=True, return_log_probs=True),
    SamplingParams(temperature=1.0, seed=12, num_tokens_to_generate=400, ignore_eos=True),
]


@pytest.fixture(scope="module")
def undisturbed(tiny_parts: dict[str, Any]) -> list[list[int]]:
    return [request.generated_tokens for request in MegatronLLM(**tiny_parts).generate(PROMPTS, PARAMS)]


async def serve_all(client: InferenceClient, seen: list[int]) -> list[list[int]]:
    """Every second request streams; ``seen`` counts streamed tokens."""

    async def one(number: int) -> list[int]:
        if number % 2:
            result = await client.add_request(PROMPTS[number], PARAMS[number])
            return list(result.generated_tokens)
        tokens: list[int] = []
        log_probs: list[float] = []
        async for update in client.stream_request(PROMPTS[number], PARAMS[number]):
            tokens += update.new_tokens
            log_probs += update.new_log_probs
            seen[0] += len(update.new_tokens)
        assert len(log_probs) in (0, len(tokens))
        return tokens

    return await asyncio.gather(*(one(number) for number in range(len(PROMPTS))))


async def test_a_killed_engine_s_requests_end_with_the_tokens_of_an_undisturbed_run(
    fleet: Fleet, tiny_checkpoint: Path, undisturbed: list[list[int]]
) -> None:
    processes = [fleet.spawn_engine(group=group, checkpoint=tiny_checkpoint) for group in range(2)]
    client = await fleet.connect()
    await fleet.ready(client, 2)
    seen = [0]
    answers = asyncio.create_task(serve_all(client, seen))
    await until(lambda: seen[0] > 10, "some progress", 60)
    processes[0].kill()
    assert await answers == undisturbed


async def test_a_killed_coordinator_changes_no_answer(tiny_checkpoint: Path, undisturbed: list[list[int]]) -> None:
    async with Fleet() as fleet:
        coordinator = await fleet.spawn_coordinator()
        fleet.spawn_engine(group=0, checkpoint=tiny_checkpoint)
        client = await fleet.connect()
        await fleet.ready(client, 1)
        seen = [0]
        answers = asyncio.create_task(serve_all(client, seen))
        await until(lambda: seen[0] > 10, "some progress", 60)
        await coordinator.close()
        await fleet.spawn_coordinator()
        assert await answers == undisturbed

"""MegatronLLM and MegatronAsyncLLM: weight updates and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messaging_support.fleet import until

from megatron_runtime.apis import MegatronAsyncLLM, MegatronLLM
from megatron_runtime.errors import CheckpointError, EngineError, InvalidRequestError, InvalidStateError
from megatron_runtime.sampling_params import SamplingParams

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=12)


@pytest.fixture(scope="module")
def parts(tiny_parts: dict[str, Any]) -> dict[str, Any]:
    """With a KV cache that is dropped on suspend."""
    config = replace(tiny_parts["inference_config"], kv_cache_management_mode="recompute")
    return tiny_parts | {"inference_config": config}


@pytest.fixture
def llm(parts: dict[str, Any]) -> Iterator[MegatronLLM]:
    with MegatronLLM(**parts, use_coordinator=True) as started:
        yield started


def turned(llm: MegatronLLM) -> dict[str, torch.Tensor]:
    """Other weights of the same model: the output projections with the opposite sign."""
    named = llm.engine.controller.model.destinations()
    return {name: -tensor if "down_proj" in name else tensor.clone() for name, tensor in named.items()}


def test_weights_change_between_pause_and_unpause_and_results_have_their_version(
    llm: MegatronLLM, tiny_checkpoint: Path
) -> None:
    (first,) = llm.generate(PROMPT, GREEDY)
    with pytest.raises(InvalidStateError, match="while the engine is RUNNING; pause it first"):
        llm.update_weights(tiny_checkpoint)
    llm.pause()
    assert llm.update_weights(turned(llm)) == 1
    llm.unpause()
    (second,) = llm.generate(PROMPT, GREEDY)
    llm.pause()
    llm.suspend()
    with pytest.raises(CheckpointError, match="nowhere"):
        llm.update_weights("nowhere.gguf")
    assert llm.update_weights(tiny_checkpoint) == 2
    llm.resume()
    llm.unpause()
    (third,) = llm.generate(PROMPT, GREEDY)
    assert [request.weight_version for request in (first, second, third)] == [0, 1, 2]
    assert first.generated_tokens == third.generated_tokens != second.generated_tokens


@pytest.mark.model
def test_direct_mode_updates_weights_between_calls(smollm2_parts: dict[str, Any], smollm2_path: Path) -> None:
    llm = MegatronLLM(**smollm2_parts)
    (first,) = llm.generate(PROMPT, GREEDY)
    assert llm.update_weights(smollm2_path) == 1
    (second,) = llm.generate(PROMPT, GREEDY)
    assert second.generated_tokens == first.generated_tokens
    assert second.weight_version == 1


@pytest.mark.model
async def test_the_pieces_of_a_stream_join_to_the_answer(smollm2_parts: dict[str, Any]) -> None:
    async with MegatronAsyncLLM(**smollm2_parts, use_coordinator=True) as llm:
        whole = await llm.generate(PROMPT, GREEDY)
        updates = [update async for update in llm.generate_stream(PROMPT, GREEDY)]
        tokens = [token for update in updates for token in update.new_tokens]
        last = updates[-1].finished
        assert last is not None
        assert [update.finished for update in updates[:-1]] == [None] * (len(updates) - 1)
        assert last.generated_tokens == tokens == whole.generated_tokens  # type: ignore[union-attr]
        assert "".join(update.new_text for update in updates) == last.generated_text
        assert len(updates) > 3

        stopping = SamplingParams(temperature=0, num_tokens_to_generate=12, stop_words=["aris"])
        pieces = [update.new_text async for update in llm.generate_stream(PROMPT, stopping)]
        assert "".join(pieces) == " P"

        with pytest.raises(TypeError, match="a single prompt"):
            llm.generate_stream([PROMPT])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="n=2: a stream has one answer"):
            llm.generate_stream(PROMPT, SamplingParams(n=2))


async def test_a_stream_that_is_closed_early_aborts_the_request(parts: dict[str, Any]) -> None:
    async with MegatronAsyncLLM(**parts, use_coordinator=True) as llm:
        endless = SamplingParams(ignore_eos=True, num_tokens_to_generate=2000)
        stream = llm.generate_stream(PROMPT, endless)
        await anext(stream)
        await stream.aclose()
        waiting = asyncio.create_task(anext(llm.generate_stream(PROMPT, endless)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await llm.generate(PROMPT, GREEDY)  # arrives after the others
        await until(lambda: not llm.engine.has_unfinished_requests(), "the end of the requests")
        assert llm.engine.stats().generated_tokens_total < 2000


async def test_a_stream_raises_the_failure_of_the_engine(parts: dict[str, Any]) -> None:
    async with MegatronAsyncLLM(**parts, use_coordinator=True) as llm:

        def broken() -> Any:
            raise ArithmeticError("the device is on fire")

        llm.engine.step_modern = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the device is on fire") as caught:
            await anext(llm.generate_stream(PROMPT, GREEDY))
        assert isinstance(caught.value.__cause__, ArithmeticError)

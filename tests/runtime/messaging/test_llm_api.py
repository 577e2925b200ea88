"""MegatronLLM and MegatronAsyncLLM with a tiny model: both modes, all forms of prompts, lifecycle and shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from megatron_runtime.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_runtime.config import InferenceConfig, PrefixCachingCoordinatorPolicy
from megatron_runtime.errors import EngineError, InvalidRequestError, InvalidStateError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams

PROMPTS = ["The capital of France is", "One, two, three,", "def add(a, b):"]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=12)
LONG = SamplingParams(temperature=0, num_tokens_to_generate=400, ignore_eos=True)
"""For answers that are unfinished while a test acts."""


@pytest.fixture(scope="module")
def parts(tiny_parts: dict[str, Any]) -> dict[str, Any]:
    return tiny_parts


@pytest.fixture(scope="module")
def expected(parts: dict[str, Any]) -> list[list[int]]:
    return [request.generated_tokens for request in MegatronLLM(**parts).generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llm(parts: dict[str, Any]) -> Iterator[MegatronLLM]:
    """In coordinator mode."""
    with MegatronLLM(**parts, use_coordinator=True) as started:
        yield started


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "requires use_coordinator=True"),
        ({"use_coordinator": False}, "requires use_coordinator=True"),
    ],
)
def test_the_async_class_has_no_direct_mode(parts: dict[str, Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        MegatronAsyncLLM(**parts, **options)


@pytest.mark.parametrize("option", [{"coordinator_host": "127.0.0.1"}, {"coordinator_port": 5557}])
def test_a_coordinator_address_needs_coordinator_mode(parts: dict[str, Any], option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="coordinator_host/port require use_coordinator=True"):
        MegatronLLM(**parts, **option)


def test_direct_mode_has_no_lifecycle_and_its_shutdown_does_nothing(parts: dict[str, Any]) -> None:
    llm = MegatronLLM(**parts)
    assert llm.is_primary_rank
    for name in ("pause", "unpause", "suspend", "resume"):
        with pytest.raises(RuntimeError, match="use_coordinator=True"):
            getattr(llm, name)()
    with pytest.raises(ValueError, match="use_coordinator=True"):
        llm.serve(ServeConfig())
    llm.wait_for_shutdown()
    llm.shutdown()
    llm.shutdown()


def test_all_prompt_shapes_are_served_in_both_modes_with_the_same_tokens(
    parts: dict[str, Any], llm: MegatronLLM, expected: list[list[int]]
) -> None:
    tokenized = [parts["tokenizer"].tokenize(prompt) for prompt in PROMPTS]
    for one in (MegatronLLM(**parts), llm):
        assert one.generate([]) == []
        shapes: list[Any] = [PROMPTS, tokenized]
        for shape in shapes:
            assert [request.generated_tokens for request in one.generate(shape, GREEDY)] == expected
            assert [request.generated_tokens for request in one.generate(shape[1], GREEDY)] == expected[1:2]


@pytest.mark.parametrize("prompts", [1.5, {"a": 1}, {"a"}, [1.0, 2.0], ["a", 1], [[1], ["a"]], None])
def test_prompts_of_unsupported_types_are_refused(llm: MegatronLLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be text"):
        llm.generate(prompts)


def test_images_are_refused_with_a_message_in_both_modes(parts: dict[str, Any], llm: MegatronLLM) -> None:
    for either in (llm, MegatronLLM(**parts)):
        with pytest.raises(InvalidRequestError, match=r"multi_modal_data: .* read text only"):
            either.generate(PROMPTS, multi_modal_data=[None, {"image": b""}, None])  # type: ignore[arg-type]


def test_coroutines_of_the_caller_run_on_the_background_loop(llm: MegatronLLM) -> None:
    async def where(fails: bool = False) -> str:
        if fails:
            raise ArithmeticError("on purpose")
        return threading.current_thread().name

    async def wait_for_itself() -> str:
        return llm.run_sync(where())

    assert llm.run_sync(where()) == llm.submit(where()).result(10) == "megatron-runtime"
    with pytest.raises(ArithmeticError, match="on purpose"):
        llm.run_sync(where(fails=True))
    with pytest.raises(RuntimeError, match="background event loop"):
        llm.submit(wait_for_itself()).result(10)


def test_direct_mode_has_no_background_loop(parts: dict[str, Any]) -> None:
    llm = MegatronLLM(**parts)
    for run in (llm.submit, llm.run_sync):
        with pytest.raises(RuntimeError, match="needs a coordinator: construct with use_coordinator=True"):
            run(asyncio.sleep(0))


def test_each_prompt_may_have_its_own_parameters(llm: MegatronLLM) -> None:
    lengths = [SamplingParams(num_tokens_to_generate=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(request.generated_tokens) for request in llm.generate(PROMPTS, lengths)] == [1, 2, 3]
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate(PROMPTS, lengths[:2])


def test_several_samples_with_penalties_are_the_same_in_both_modes(parts: dict[str, Any], llm: MegatronLLM) -> None:
    params = SamplingParams(
        n=3, seed=7, num_tokens_to_generate=8, frequency_penalty=0.5, logit_bias={65: 1.0}, min_tokens=8
    )
    direct, served = (
        [request.generated_tokens for request in one.generate(PROMPTS[:2], params)]
        for one in (MegatronLLM(**parts), llm)
    )
    assert direct == served
    assert [len(tokens) for tokens in direct] == [8] * 6
    assert len({tuple(tokens) for tokens in direct}) == 6


def test_log_probs_are_the_same_in_both_modes(parts: dict[str, Any], llm: MegatronLLM) -> None:
    wanted = SamplingParams(
        temperature=0, num_tokens_to_generate=5, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2
    )
    direct, coordinated = (one.generate(PROMPTS[0], wanted)[0] for one in (MegatronLLM(**parts), llm))
    assert coordinated.generated_log_probs == pytest.approx(direct.generated_log_probs)
    assert [list(top) for top in coordinated.generated_top_n_logprobs or []] == [
        list(top) for top in direct.generated_top_n_logprobs or []
    ]


def test_a_request_that_does_not_fit_ends_as_failed(llm: MegatronLLM) -> None:
    (request,) = llm.generate([[1] * 100_000])
    assert request.failed()
    assert "100000" in str(request.error)


def test_several_threads_are_served_together(llm: MegatronLLM, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].generated_tokens, PROMPTS))
    assert results == expected


def test_a_request_sent_while_paused_waits_through_suspend_and_resume(
    llm: MegatronLLM, expected: list[list[int]]
) -> None:
    llm.pause()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, PROMPTS[0], GREEDY)
        llm.suspend()
        assert not future.done()
        llm.resume()
        assert not future.done()
        llm.unpause()
        assert future.result(60)[0].generated_tokens == expected[0]


def test_lifecycle_methods_raise_in_the_wrong_state_instead_of_hanging(llm: MegatronLLM) -> None:
    for name in ("unpause", "suspend", "resume"):
        with pytest.raises(InvalidStateError, match="RUNNING; possible: pause"):
            getattr(llm, name)()


def test_blocking_calls_work_beside_an_event_loop(llm: MegatronLLM, expected: list[list[int]]) -> None:
    async def inside() -> list[DynamicInferenceRequest]:
        return llm.generate(PROMPTS[0], GREEDY)

    assert asyncio.run(inside())[0].generated_tokens == expected[0]


def test_cached_tokens_are_reported_through_a_coordinator(parts: dict[str, Any]) -> None:
    config = InferenceConfig(
        kv_cache_memory_bytes=64 * 2**20,
        enable_prefix_caching=True,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
    )
    with MegatronLLM(**{**parts, "inference_config": config}, use_coordinator=True) as llm:
        prompt = list(range(100, 140))
        counts = [llm.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 32]


def test_a_killed_coordinator_is_restarted_and_no_request_is_lost(parts: dict[str, Any], llm: MegatronLLM) -> None:
    expected = [request.generated_tokens for request in MegatronLLM(**parts).generate(PROMPTS, LONG)]
    assert llm._runtime is not None
    assert llm._runtime._attached is not None
    coordinator = llm._runtime._attached.coordinator
    assert coordinator is not None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, PROMPTS, LONG)
        assert coordinator.pid is not None
        os.kill(coordinator.pid, signal.SIGKILL)
        assert [request.generated_tokens for request in future.result(60)] == expected


def test_a_failure_of_the_engine_reaches_every_waiter_with_its_cause(parts: dict[str, Any]) -> None:
    llm = MegatronLLM(**parts, use_coordinator=True)
    failures: list[BaseException | None] = []

    def wait() -> None:
        with pytest.raises(EngineError) as caught:
            llm.wait_for_shutdown()
        failures.append(caught.value.__cause__)

    waiter = threading.Thread(target=wait)
    waiter.start()

    def broken() -> Any:
        raise ArithmeticError("the device is on fire")

    llm.engine.step_modern = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the device is on fire") as caught:
        llm.generate(PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    waiter.join(20)
    assert isinstance(failures[0], ArithmeticError)
    with pytest.raises(EngineError):
        llm.generate(PROMPTS, GREEDY)
    llm.shutdown()


async def test_the_async_class_returns_one_request_for_one_prompt_and_a_list_for_a_batch(
    parts: dict[str, Any], expected: list[list[int]]
) -> None:
    async with MegatronAsyncLLM(**parts, use_coordinator=True) as llm:
        single = await llm.generate(PROMPTS[0], GREEDY)
        assert isinstance(single, DynamicInferenceRequest)
        assert single.generated_tokens == expected[0]
        batch = await llm.generate(PROMPTS, GREEDY)
        assert isinstance(batch, list)
        assert [request.generated_tokens for request in batch] == expected
        several = await llm.generate(PROMPTS[0], SamplingParams(n=2, num_tokens_to_generate=1))
        assert isinstance(several, list)
        assert len(several) == 2
        assert await llm.generate([]) == []
        endless = asyncio.create_task(llm.generate("Once upon a time", SamplingParams(ignore_eos=True)))
        await asyncio.sleep(0)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        await llm.pause()
        await llm.suspend()
        await llm.resume()
        await llm.unpause()
        waiting = asyncio.create_task(llm.wait_for_shutdown())
    await waiting
    await llm.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await llm.generate(PROMPTS)


@pytest.mark.model
async def test_serve_returns_when_the_endpoint_is_ready_and_shutdown_ends_a_blocking_serve(
    smollm2_parts: dict[str, Any],
) -> None:
    llm = MegatronAsyncLLM(**smollm2_parts, use_coordinator=True)
    config = ServeConfig(host="127.0.0.1", port=0, frontend_replicas=1, served_name="chat")
    await llm.serve(config, blocking=False)
    assert llm.frontend_address is not None
    async with httpx.AsyncClient(base_url="http://{}:{}/v1".format(*llm.frontend_address)) as http:
        assert (await http.get("/models")).json()["data"][0]["id"] == "chat"
        body = {"model": "chat", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 5}
        answer = (await http.post("/completions", json=body, timeout=60)).json()
        assert "Paris" in answer["choices"][0]["text"]
    await llm.shutdown()
    assert llm.frontend_address is None

    llm = MegatronAsyncLLM(**smollm2_parts, use_coordinator=True)
    serving = asyncio.create_task(llm.serve(config))
    while llm.frontend_address is None:
        assert not serving.done()
        await asyncio.sleep(0.05)
    await llm.shutdown()
    await serving

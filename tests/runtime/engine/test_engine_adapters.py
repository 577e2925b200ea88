"""Requests of several adapters in one engine: their answers are those of merged weights, whatever else happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import lock_step_scenarios
from runtime_support.adapters import merged, without_memory, write_adapter
from runtime_support.memory_shortages import ALLOCATOR, CUDA, Shortage
from runtime_support.rank_processes import run_ranks
from runtime_support.reference_models import assert_most_likely
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.worker import free_port
from transformers import AutoModelForCausalLM

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import CheckpointError, ConfigurationError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import AdapterEntry

PROMPT = [(7 * place) % 256 for place in range(30)]
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each of NAMES."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, base, rank=2 + seed, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def references(base: Any, folders: dict[str, Path]) -> dict[str | None, Any]:
    """The model with each adapter merged, and without one."""
    return {None: base} | {name: merged(base, folder) for name, folder in folders.items()}


MakeEngine = Callable[..., DynamicInferenceEngine]


@pytest.fixture
def make_engine(checkpoint: Path) -> MakeEngine:
    def make(blocks: int = 200, **settings: Any) -> DynamicInferenceEngine:
        model = load_model(checkpoint, dtype="float32")
        config = InferenceConfig(
            block_size_tokens=4,
            kv_cache_memory_bytes=blocks * KVCache.block_bytes(model.config, 4, model.dtype),
            **{"enable_prefix_caching": True, **settings},
        )
        return DynamicInferenceEngine.build(model, load_tokenizer(checkpoint), config)

    return make


def params(adapter: str | None, count: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0, num_tokens_to_generate=count, ignore_eos=True, adapter=adapter)


def ask(engine: DynamicInferenceEngine, *adapters: str | None) -> list[DynamicInferenceRequest]:
    """The answers to PROMPT, in one batch."""
    return [record.merge() for record in engine.generate([PROMPT] * len(adapters), [params(each) for each in adapters])]


def run_to_end(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()


def test_answers_of_one_batch_are_those_of_merged_weights(
    make_engine: MakeEngine, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    engine = make_engine()
    alone = ask(engine, None)
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    adapters = ("first", None, "second", "first")
    answers = ask(engine, *adapters)
    for name, answer in zip(adapters, answers, strict=True):
        assert_most_likely(references[name], PROMPT, answer.generated_tokens)
    assert answers[1].generated_tokens == alone[0].generated_tokens
    assert answers[0].generated_tokens == answers[3].generated_tokens
    assert len({tuple(answer.generated_tokens) for answer in answers}) == 3


@pytest.mark.parametrize("error", [ALLOCATOR, CUDA], ids=["allocator", "cuda"])
def test_an_adapter_without_memory_is_refused_with_the_remedy_and_changes_nothing(
    make_engine: MakeEngine, folders: dict[str, Path], error: Shortage
) -> None:
    engine = make_engine()
    engine.adapters.load("first", folders["first"])
    before = ask(engine, "first", None)
    shortage = r"second: cpu ran out of memory while it .*; lower --kv-cache-mem"
    with without_memory(at_call=3, shortage=error), pytest.raises(CheckpointError, match=shortage):
        engine.adapters.load("second", folders["second"])
    assert [request.generated_tokens for request in ask(engine, "first", None)] == [r.generated_tokens for r in before]
    with pytest.raises(InvalidRequestError, match="loaded adapters: first"):
        engine.adapters.find("second")
    engine.adapters.load("second", folders["second"])


def test_speculation_changes_no_answer_of_an_adapter(make_engine: MakeEngine, folders: dict[str, Path]) -> None:
    answers = []
    for settings in ({}, {"num_speculative_tokens": 3}):
        engine = make_engine(**settings)
        engine.context.clock = lambda: 0.0  # Drafts are permitted whatever they cost here.
        for name, folder in folders.items():
            engine.adapters.load(name, folder)
        adapters = ("first", None, "second", "first")
        requests = [params(name, 60) for name in adapters]
        for request in requests:
            request.logit_bias = {70: 4.0, 71: 4.0}  # so that answers repeat themselves
        records = engine.generate([PROMPT] * len(adapters), requests)
        answers.append([record.merge().generated_tokens for record in records])
    assert answers[0] == answers[1]
    assert engine.stats().accepted_draft_tokens_total > 0


def test_the_prefix_cache_distinguishes_adapters_and_their_contents(
    make_engine: MakeEngine, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    engine = make_engine()
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    cached = [ask(engine, name)[0].num_cached_tokens for name in (None, *NAMES, None, *NAMES)]
    assert cached == [0, 0, 0, 28, 28, 28]
    engine.adapters.load("first", folders["second"])
    (answer,) = ask(engine, "first")
    assert answer.num_cached_tokens == 28, "the same files under another name have the same keys and values"
    assert_most_likely(references["second"], PROMPT, answer.generated_tokens)
    engine.adapters.unload("first")
    engine.adapters.load("first", folders["first"])
    (answer,) = ask(engine, "first")
    assert_most_likely(references["first"], PROMPT, answer.generated_tokens)


def test_another_adapter_of_the_same_name_finds_no_blocks_of_the_old_one(
    make_engine: MakeEngine, base: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine()
    engine.adapters.load("first", folders["first"])
    ask(engine, "first")
    replaced = write_adapter(tmp_path / "replaced", base, seed=9)
    engine.adapters.load("first", replaced)
    (answer,) = ask(engine, "first")
    assert answer.num_cached_tokens == 0
    assert_most_likely(merged(base, replaced), PROMPT, answer.generated_tokens)


@pytest.mark.parametrize("replaces", [False, True])
def test_requests_that_run_keep_an_unloaded_adapter(
    replaces: bool, make_engine: MakeEngine, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    engine = make_engine()
    slots = engine.controller.model.use_adapters()
    engine.adapters.load("first", folders["first"])
    future = engine.add_request(0, PROMPT, params("first"))
    engine.step_modern()
    if replaces:
        engine.adapters.load("first", folders["second"])
        later = engine.add_request(1, PROMPT, params("first"))
    else:
        engine.adapters.unload("first")
        refused = engine.add_request(1, PROMPT, params("first")).result(timeout=0).merge()
        assert refused.failed()
        assert "adapter='first' is not loaded; loaded adapters: none" in str(refused.events[-2].payload)
    assert len(slots) == 1 + replaces
    run_to_end(engine)
    assert_most_likely(references["first"], PROMPT, future.result(timeout=0).merge().generated_tokens)
    assert len(slots) == replaces
    if replaces:
        assert_most_likely(references["second"], PROMPT, later.result(timeout=0).merge().generated_tokens)


@pytest.mark.parametrize("mode", KVCacheManagementMode)
def test_evictions_and_suspensions_keep_the_adapters(
    mode: KVCacheManagementMode, make_engine: MakeEngine, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    engine = make_engine(20, kv_cache_management_mode=mode, offload_weights=True)
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    adapters = ("first", None, "second", "first")
    futures = [engine.add_request(number, PROMPT, params(name, 40)) for number, name in enumerate(adapters)]
    for step in range(200):
        if step == 6:
            engine.suspend()
            engine.resume()
        if engine.has_unfinished_requests():
            engine.step_modern()
    assert engine.stats().evictions_total > 0
    for name, future in zip(adapters, futures, strict=True):
        assert_most_likely(references[name], PROMPT, future.result(timeout=0).merge().generated_tokens)


def test_adapters_are_loaded_while_the_weights_are_released(
    make_engine: MakeEngine, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    engine = make_engine(offload_weights=True)
    engine.suspend()
    engine.adapters.load("first", folders["first"])
    engine.resume()
    assert_most_likely(references["first"], PROMPT, ask(engine, "first")[0].generated_tokens)


def test_an_assignment_changes_all_or_nothing(make_engine: MakeEngine, folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=2)
    slots = engine.controller.model.use_adapters()
    first, second = (AdapterEntry(name, str(folder), 1) for name, folder in folders.items())
    engine.assign_adapters([first])
    with pytest.raises(CheckpointError, match="nowhere: has no"):
        engine.assign_adapters([second, AdapterEntry("third", "/nowhere", 2)])
    assert len(slots) == 1
    assert engine.adapters.find("first") is not None
    with pytest.raises(CheckpointError, match="3 adapters are more than --max-loras 2; raise it"):
        engine.assign_adapters([first, second, AdapterEntry("third", str(folders["first"]), 2)])
    engine.assign_adapters([second])
    with pytest.raises(InvalidRequestError, match="loaded adapters: second"):
        engine.adapters.find("first")
    assert len(slots) == 1


def test_assigned_adapters_and_own_ones_do_not_share_names(make_engine: MakeEngine, folders: dict[str, Path]) -> None:
    engine = make_engine()
    path = folders["first"]
    engine.adapters.load("own", path)
    with pytest.raises(CheckpointError, match="'own' is one of --lora-modules"):
        engine.assign_adapters([AdapterEntry("own", str(path), 1)])
    engine.assign_adapters([AdapterEntry("assigned", str(path), 1)])
    with pytest.raises(CheckpointError, match="assigned by the coordinator"):
        engine.adapters.load("assigned", path)
    with pytest.raises(InvalidRequestError, match="unload it there"):
        engine.adapters.unload("assigned")
    assert engine.adapters.own == [("own", str(path))]


def test_limits_are_whole_numbers() -> None:
    with pytest.raises(ConfigurationError, match="max_loras=0 must be"):
        InferenceConfig(max_loras=0)
    with pytest.raises(InvalidRequestError, match="adapter='' must be a text"):
        SamplingParams(adapter="")


@pytest.mark.parametrize("sizes", [ParallelSizes(tensor=2), ParallelSizes(pipeline=2)], ids=str)
def test_all_ranks_change_adapters_at_the_same_point(
    sizes: ParallelSizes, checkpoint: Path, folders: dict[str, Path], references: dict[str | None, Any]
) -> None:
    paths = list(folders.values())
    results = run_ranks(lock_step_scenarios.adapt, 2, sizes, free_port(), checkpoint, paths)
    assert [each["loaded"] for each in results] == [0, 0]
    assert "on another rank: " in results[0]["shortage"]
    assert "cpu ran out of memory while it loaded an adapter (CUDA out of memory); lower" in results[0]["shortage"]
    assert "nowhere: has no adapter_config.json" in results[0]["error"]
    assert results[0]["refused"] == "FAILED"
    for reference, tokens in zip(
        (references["first"], references["second"], references[None]), results[0]["answers"], strict=True
    ):
        assert_most_likely(reference, [1, 2, 3], tokens)

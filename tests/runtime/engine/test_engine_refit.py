"""New weights in an engine with requests, and the memory that a suspended engine returns."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_runtime.config import KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=12, ignore_eos=True)


@pytest.fixture
def make_own(make_engine: MakeEngine, tiny_model: Decoder) -> MakeEngine:
    """Like ``make_engine``, but each engine has a separate model, whose weights may change."""

    def make(weights: dict[str, Tensor] | None = None, **settings: object) -> DynamicInferenceEngine:
        engine = make_engine(**settings)
        engine.controller.model = Decoder(tiny_model.config, dtype=torch.float32)
        engine._passes._controller = engine.controller
        engine.update_weights(weights or dict(tiny_model.destinations()), version=0)
        return engine

    return make


@pytest.fixture
def other_weights(tiny_model: Decoder) -> dict[str, Tensor]:
    return {name: tensor.flip(0) for name, tensor in tiny_model.destinations().items()}


def run(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()


@pytest.mark.parametrize("suspended", [False, True])
def test_an_engine_with_updated_weights_answers_like_one_that_loaded_them(
    make_own: MakeEngine, other_weights: dict[str, Tensor], suspended: bool
) -> None:
    expected = make_own(other_weights).generate([PROMPT], GREEDY)[0].merge().generated_tokens
    engine = make_own(enable_prefix_caching=True)
    old = engine.generate([PROMPT], GREEDY)[0].merge()
    assert old.generated_tokens != expected
    if suspended:
        engine.suspend()
    assert engine.update_weights(other_weights) == 1
    engine.resume()
    new = engine.generate([PROMPT], GREEDY)[0].merge()
    assert new.generated_tokens == expected
    assert new.num_cached_tokens == 0, "a prefix of the old weights was used"
    assert engine.generate([PROMPT], GREEDY)[0].merge().num_cached_tokens == 8
    assert (old.weight_version, new.weight_version, engine.stats().weight_version) == (0, 1, 1)


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_a_request_in_flight_continues_with_the_new_weights_and_counts_its_staleness(
    make_own: MakeEngine, other_weights: dict[str, Tensor], mode: KVCacheManagementMode
) -> None:
    engine = make_own(kv_cache_management_mode=mode)
    future = engine.add_request(0, PROMPT, GREEDY)
    for _ in range(4):
        engine.step_modern()
    made = list(engine.get_request(0).generated_tokens)
    engine.suspend()
    engine.update_weights(other_weights)
    engine.resume()
    run(engine)
    merged = future.result(timeout=0).merge()
    assert merged.generated_tokens[: len(made)] == made
    assert merged.weight_version == 1
    assert merged.policy_staleness is not None
    assert merged.kv_cache_staleness is not None
    old = len(PROMPT) + len(made)
    assert merged.policy_staleness.tolist() == [1] * old + [0] * (12 - len(made))
    if mode is KVCacheManagementMode.RECOMPUTE:
        assert not merged.kv_cache_staleness.any()
        rest = SamplingParams(temperature=0, num_tokens_to_generate=12 - len(made), ignore_eos=True)
        alone = make_own(other_weights).generate([PROMPT + made], rest)[0].merge()
        assert merged.generated_tokens[len(made) :] == alone.generated_tokens
    else:
        assert merged.kv_cache_staleness.tolist() == merged.policy_staleness.tolist()


def test_weights_that_do_not_fit_change_nothing(make_own: MakeEngine, other_weights: dict[str, Tensor]) -> None:
    engine = make_own()
    expected = engine.generate([PROMPT], GREEDY)[0].merge().generated_tokens
    del other_weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight missing"):
        engine.update_weights(other_weights)
    again = engine.generate([PROMPT], GREEDY)[0].merge()
    assert (again.generated_tokens, again.weight_version) == (expected, 0)


def test_offloading_keeps_exactly_the_blocks_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine(64, kv_cache_management_mode="offload", enable_prefix_caching=True)
    engine.generate([PROMPT], GREEDY)
    engine.add_request(0, [9, 8, 7, 6, 5], GREEDY)
    engine.step_modern()
    cache, held = engine.context.kv_cache, engine.context.allocator.held()
    before = [[part[held].clone() for part in cache.layer(layer)] for layer in range(2)]
    assert 0 < len(held) < 64
    engine.suspend()
    assert cache._offloaded is not None
    assert sum(copy.nbytes for copy in cache._offloaded[1]) == cache.num_bytes * len(held) // 64
    engine.resume()
    for layer, parts in enumerate(before):
        assert all(torch.equal(now[held], then) for now, then in zip(cache.layer(layer), parts, strict=True))
    run(engine)
    assert engine.generate([PROMPT], GREEDY)[0].merge().num_cached_tokens == 8


MEASURE = """
    import re, sys
    from pathlib import Path
    import torch
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_runtime.model.checkpoint import load_model, load_tokenizer
    from megatron_runtime.processes.allocator import return_freed_memory
    from megatron_runtime.sampling_params import SamplingParams

    def resident():  # without mapped files, which the system takes back by itself
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    path, mode, offload = sys.argv[1:]
    torch.set_num_threads(1)
    settings = dict(kv_cache_memory_bytes=128 * 2**20, kv_cache_management_mode=mode)
    config = InferenceConfig(**settings, offload_weights=offload == "True")
    engine = DynamicInferenceEngine.build(load_model(path, dtype="float32"), load_tokenizer(path), config)
    expected = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, num_tokens_to_generate=8))
    torch._foreach_zero_(engine.context.kv_cache._storage)  # as a busy engine has written to all of it
    future = engine.add_request(0, [5, 6, 7], SamplingParams(temperature=0, num_tokens_to_generate=8))
    for _ in range(3):
        engine.step_modern()
    return_freed_memory()  # suspend() does so as well, and would return more than it releases
    before = resident()
    engine.suspend()
    print(before - resident())
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result(timeout=0).merge().generated_tokens == expected[0].merge().generated_tokens
"""
POOL = 128 * 2**20
WEIGHTS = 4 * 2 * 11_943_936
"""Of the 2 layers of ``large_checkpoint`` as float32, without embedding and head."""
SLACK = 16 * 2**20


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to distinguish its weights from other changes of a process's memory."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("large"), hidden=1152, layers=2)
    weights = load_file(folder / "model.safetensors")
    # Another dtype than in memory, so that they are read and not mapped.
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("mode", "offload_weights"),
    [
        (KVCacheManagementMode.PERSIST, False),
        (KVCacheManagementMode.PERSIST, True),
        (KVCacheManagementMode.OFFLOAD, False),
        (KVCacheManagementMode.RECOMPUTE, True),
    ],
)
def test_a_suspended_process_returns_the_released_memory(
    large_checkpoint: Path, mode: KVCacheManagementMode, offload_weights: bool
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(large_checkpoint), mode.value, str(offload_weights)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
    given_back = int(outcome.stdout)
    pool = 0 if mode is KVCacheManagementMode.PERSIST else POOL
    if offload_weights:
        assert given_back >= pool + WEIGHTS - SLACK
    else:
        assert abs(given_back - pool) <= SLACK

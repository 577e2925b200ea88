"""FlashInfer as the attention of a model. Its wrapper is a fake, because its kernels need a GPU."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper, fake_flashinfer
from gpu_support.paged import PagedCase
from gpu_support.pretended import PretendedDevice
from gpu_support.small_engine import LATENTS, generate, on_gpu, random_decoder, small_engine, suspend_and_resume

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.gpu.attention import PagedBatch
from megatron_runtime.gpu.flashinfer_attention import FlashInfer, FlashInferPass, PassTables
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kernels.flashinfer_backend import choose_backend

GPU = torch.device("cuda")


@pytest.fixture
def fake() -> Iterator[type[BatchPrefillWithPagedKVCacheWrapper]]:
    with fake_flashinfer() as wrapper:
        yield wrapper


CASES: dict[str, tuple[Any, ...]] = {
    "single tokens": (((1, 1), (17, 1), (64, 1)), (4, 2), 64, 16, None, None),
    "prompts and single tokens": (((40, 1), (33, 20), (5, 5)), (6, 2), 128, 16, None, None),
    "windows": (((70, 1), (66, 20)), (8, 1), 64, 16, 13, None),
    "a window of one token": (((70, 1), (6, 6)), (2, 1), 64, 16, 1, None),
    "soft cap and window": (((75, 1), (40, 9)), (2, 1), 256, 64, 20, 5.0),
}


@pytest.mark.usefixtures("poisoned_memory", "fake")
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_that_of_float64(name: str) -> None:
    """With NaN where the cache has nothing."""
    lengths, heads, width, page, window, soft_cap = CASES[name]
    case = PagedCase.random(lengths, heads, width, page, torch.float16)
    before = [array.clone() for array in case.cache]
    contexts = torch.tensor([length for length, _ in lengths], dtype=torch.int32)
    batch = PagedBatch(case.slots, case.query_starts, contexts, case.tables)
    tables = PassTables.of(case.query_starts, contexts, case.tables, page)
    attention = FlashInferPass(FlashInfer(torch.device("cpu")), batch, tables)
    found = attention.attend(case.heads, case.rotation, case.cache, window, soft_cap)
    case.check_cache(before)
    expected = case.expected(window, soft_cap)
    assert (found.double() - expected).norm() / expected.norm() < 1e-3


def test_layers_of_a_kind_are_planned_once_a_pass(fake: type[BatchPrefillWithPagedKVCacheWrapper]) -> None:
    case = PagedCase.random(((20, 1), (9, 4)), (4, 2), 64, 16, torch.float16)
    contexts = torch.tensor([20, 9], dtype=torch.int32)
    batch = PagedBatch(case.slots, case.query_starts, contexts, case.tables)
    flashinfer = FlashInfer(torch.device("cpu"))
    for passes in (1, 2):
        attention = FlashInferPass(flashinfer, batch, PassTables.of(case.query_starts, contexts, case.tables, 16))
        for window in (None, 8, None, 8):
            attention.attend(case.heads, case.rotation, case.cache, window, None)
        assert fake.plans == 2 * passes


ENGINES: dict[str, tuple[dict[str, Any], Any]] = {
    "prefixes and chunks": ({"enable_prefix_caching": True, "max_tokens": 8}, None),
    "offload": ({"kv_cache_management_mode": "offload"}, suspend_and_resume),
}


@pytest.mark.usefixtures("device_guard")
@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_gives_the_same_tokens(
    name: str, fake: type[BatchPrefillWithPagedKVCacheWrapper], device: PretendedDevice
) -> None:
    """And copies no table from the device."""
    config, between = ENGINES[name]
    model = random_decoder()
    expected = generate(small_engine(model, **config), {})
    other = on_gpu(model)
    other.flashinfer = FlashInfer(GPU)
    other.prepare_kernels(16)
    assert fake.plans == 4, "the kernels of each kind of batch are compiled while the weights load"
    device.work.waits.clear()
    engine = small_engine(other, num_cuda_graphs=-1, **config)
    assert engine.capture_stats is None
    assert generate(engine, {}, between) == expected
    assert fake.plans > 3
    assert device.work.kernels["rotate_and_store"] > 0
    assert not {kernel for kernel in device.work.kernels if kernel.startswith("attend")}
    assert not [line for line in device.work.waits if "flashinfer_backend" in line]


@pytest.mark.usefixtures("device_guard", "fake", "device")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_cuda_graphs": 1}, "num_cuda_graphs=1: the host plans FlashInfer's attention for each pass"),
        ({"batch_invariant": True}, "batch_invariant=True: FlashInfer divides contexts by the batch"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': the model has FlashInfer's attention"),
    ],
)
def test_settings_of_the_engine_that_are_not_supported_are_refused(config: dict[str, Any], words: str) -> None:
    model = on_gpu(random_decoder())
    model.flashinfer = FlashInfer(GPU)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        small_engine(model, **config)


def choose(choice: str = "flashinfer", kind: str = "auto", device: torch.device = GPU, **changes: Any) -> Any:
    """For a model with heads of 64 channels."""
    dtype = changes.pop("dtype", torch.float16)
    config: ModelConfig = random_decoder(**({"head_dim": 64} | changes)).config
    return choose_backend(choice, config, dtype, device, kind)


@pytest.mark.usefixtures("fake")
def test_it_is_chosen_only_if_it_is_asked_for() -> None:
    assert choose("auto") is None
    assert isinstance(choose(), FlashInfer)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"choice": "fast"}, "attention_backend='fast': use one of auto, flashinfer"),
        ({"device": torch.device("cpu")}, "FlashInfer computes on GPUs, and the device is cpu; use 'auto'"),
        ({"kind": "fp8"}, "a cache in fp8 is not supported"),
        ({"dtype": torch.float32}, "computes in float16 and bfloat16, and the dtype is torch.float32"),
        ({"head_dim": 80}, "has kernels for heads of 64, 128, 256 channels, not of 80"),
        ({"attention_sinks": True}, "attention sinks are not supported"),
        ({"chunked_windows": True}, "attention in chunks is not supported"),
        (LATENTS, "multi-head latent attention is not supported"),
    ],
)
def test_what_it_does_not_support_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        choose(**changes)


def test_an_absent_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigurationError, match="install it with pip install flashinfer-python, or use 'auto'"):
        choose()


@pytest.mark.usefixtures("device_guard", "device", "program")
def test_the_program_for_gpus_compares_and_times_it() -> None:
    results = importlib.import_module("gpu_checks.results")
    checks = importlib.import_module("gpu_checks.flashinfer").checks(results.TOY)
    with fake_flashinfer() as wrapper:
        found = [*results.run(checks)]
        assert wrapper.plans > 0
    assert not [each for each in found if each.is_wrong]
    names = {each.name for each in found}
    assert {"flashinfer: single tokens, float16", "flashinfer: prompts and single tokens, float16"} <= names
    assert {each.name for each in found if "this project's kernels" in each.value} == {
        f"flashinfer: batch {results.TOY.batches[-1]}, context {results.TOY.contexts[-1]}",
        f"flashinfer: prompt of {results.TOY.prompt} tokens",
    }


@pytest.mark.usefixtures("program")
def test_the_program_for_gpus_says_that_the_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    results = importlib.import_module("gpu_checks.results")
    found = [*results.run(importlib.import_module("gpu_checks.flashinfer").checks(results.TOY))]
    assert len(found) == 2
    assert all(each.value.startswith("not measured: flashinfer-python can't be imported") for each in found)
    assert not any(each.is_wrong for each in found)


def test_the_fake_has_the_arguments_of_the_package() -> None:
    """Those of its source, because its import needs more packages."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flashinfer-python is not installed")
    source = Path(found.submodule_search_locations[0], "prefill.py").read_text()
    name = BatchPrefillWithPagedKVCacheWrapper.__name__
    (theirs,) = (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == name)
    for method in ("__init__", "plan", "run"):
        *_, definition = (each for each in theirs.body if isinstance(each, ast.FunctionDef) and each.name == method)
        positional = [each.arg for each in definition.args.args]
        ours = inspect.signature(getattr(BatchPrefillWithPagedKVCacheWrapper, method)).parameters.values()
        at = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert positional[: len(at)] == at
        accepted = {*positional, *(each.arg for each in definition.args.kwonlyargs)}
        assert {each.name for each in ours} <= accepted

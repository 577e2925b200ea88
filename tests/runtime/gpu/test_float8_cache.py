"""Keys and values in fp8: attention in Triton's interpreter against float64, and the engine on a pretended GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support.float8_cache import RoundedAttention, in_float8, widened
from gpu_support.paged import PagedCase
from gpu_support.pretended import Work, pretended_device
from gpu_support.small_engine import LATENTS, generate, on_gpu, one_layer, small_engine, suspend_and_resume

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.kv_cache import FLOAT8, KVCache

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}
CASES: dict[str, tuple[Any, Any]] = {
    "single tokens": ((((1, 1), (17, 1), (40, 1)), (4, 2), 24), (None, None)),
    "prompts and single tokens, a window and a soft cap": ((((20, 1), (33, 20), (5, 5)), (4, 2), 64), (13, 5.0)),
    "several splits": ((((70, 1), (90, 1)), (2, 1), 16), (None, None)),
}


@pytest.mark.usefixtures("poisoned_memory", "short_splits")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_that_of_float64(name: str, dtype: torch.dtype) -> None:
    """Of what the cache has, new keys and values among it; what no request has is NaN."""
    (lengths, heads, width), limits = CASES[name]
    plain = PagedCase.random(lengths, heads, width, 16, dtype)
    case = in_float8(plain)
    found, expected = case.attend(*limits), widened(case).expected(*limits)
    assert float((found.double() - expected).norm() / expected.norm()) <= LIMITS[dtype]
    plain.attend(*limits)
    for stored, exact in zip(case.cache, plain.cache, strict=True):
        assert torch.equal(stored, exact.to(FLOAT8).view(torch.uint8))


def test_large_numbers_become_the_largest_one() -> None:
    """And those that are none stay so."""
    case = in_float8(PagedCase.random(((3, 3),), (1, 1), 16, 16, torch.float32, turned=0))
    case.heads[0, :, 0], case.heads[1, :, 1], case.heads[2, :, 2] = 1e6, -449.0, torch.nan
    case.attend(None, None)
    for array in widened(case).cache:
        block, at = case.slots // 16, case.slots % 16
        stored = array[block, 0, at]
        assert (stored[0, 0], stored[1, 1]) == (448.0, -448.0)
        assert stored[2, 2].isnan()


@pytest.mark.usefixtures("exact_products", "short_splits")
def test_the_bits_of_a_request_do_not_depend_on_others() -> None:
    alone = PagedCase.random(((70, 1),), (4, 2), 16, 16, torch.float16)
    for other in ((40, 1), (7, 7)):
        both = PagedCase.random(((70, 1), other), (4, 2), 16, 16, torch.float16).with_first_of(alone)
        assert torch.equal(in_float8(both).attend(None, None)[:1], in_float8(alone).attend(None, None))


ENGINES: dict[str, tuple[dict[str, Any], Any]] = {
    "graphs, prefixes, chunks": ({"num_cuda_graphs": 1, "enable_prefix_caching": True, "max_tokens": 8}, None),
    "offload": ({"kv_cache_management_mode": "offload"}, suspend_and_resume),
}


@pytest.mark.usefixtures("device_guard")
@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_gives_the_tokens_of_rounded_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (config, between), model, lengths = ENGINES[name], one_layer(), (4, 5)
    with monkeypatch.context() as rounding:
        rounding.setattr(
            "megatron_runtime.model.decoder.plan_attention",
            lambda batch, cache, _: RoundedAttention(batch, cache.block_size_tokens),
        )
        expected = generate(small_engine(model), {}, lengths=lengths)
    assert expected != generate(small_engine(model), {}, lengths=lengths), "the rounding changes nothing here"
    with pretended_device() as device:
        other = on_gpu(model)
        other.prepare_kernels(16, "fp8")
        compiled, device.work = device.work.variants, Work()
        engine = small_engine(other, kv_cache_dtype="fp8", **config)
        cache = engine.context.kv_cache
        assert cache.num_bytes == cache.num_blocks * KVCache.block_bytes(model.config, 16, model.dtype) // 4
        assert generate(engine, {}, between, lengths) == expected
    of_attention = {variant for variant in device.work.variants if "attend" in variant[0] or "rotate" in variant[0]}
    assert of_attention <= compiled, "a request would wait for the compiler"


@pytest.mark.usefixtures("device_guard")
def test_what_has_no_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype='fp8': CPUs have no kernels .*; use 'auto'"):
        small_engine(one_layer(), kv_cache_dtype="fp8")
    with pytest.raises(ConfigurationError, match="kv_cache_dtype='int8' is unknown; choose one of auto, fp8"):
        small_engine(one_layer(), kv_cache_dtype="int8")
    with pretended_device():
        with pytest.raises(ConfigurationError, match="multi-head latent attention is not supported in fp8"):
            small_engine(on_gpu(one_layer(**LATENTS)), kv_cache_dtype="fp8")
        monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: 86)
        with pytest.raises(ConfigurationError, match=r"compute capability 8\.9 on have fp8, and this one has 8\.6"):
            small_engine(on_gpu(one_layer()), kv_cache_dtype="fp8")

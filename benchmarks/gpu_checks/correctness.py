"""Whether kernels and engine compute the right thing, with the cases of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_support import latents
from gpu_support.paged import PagedCase
from runtime_support.byte_backend import END, byte_backend
from torch import Tensor

from gpu_checks.results import DEVICE, Check, Result, Sizes
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP
from megatron_runtime.engine.sampling.sampler import make_sampler, sample
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.gpu import rows
from megatron_runtime.launch.sample_model import MODEL, models_folder
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.config import LatentAttentionConfig, ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.products import FIXED_ROWS, linear
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative errors of a kernel, by type: of the norm of the result."""
ATTENTION: dict[str, tuple[tuple[tuple[int, int], ...], tuple[int, int], int, int | None, float | None]] = {
    "single tokens": (((1, 1), (17, 1), (40, 1)), (4, 2), 64, None, None),
    "prompts and single tokens": (((20, 1), (33, 20), (5, 5)), (4, 2), 128, None, None),
    "window and soft cap": (((40, 1), (36, 9)), (2, 1), 64, 13, 5.0),
    "wide heads, several splits": (((530, 1), (9, 9)), (2, 1), 256, None, None),
}
"""Lengths and new tokens, heads on key heads, width, window and soft cap."""
LATENTS: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "single tokens": (((1, 1), (17, 1), (40, 1)), 16),
    "prompts and single tokens": (((20, 1), (13, 7), (5, 5)), 16),
    "heads in several programs, several splits": (((300, 1),), 128),
}
"""Lengths and new tokens, and heads; with the widths of DeepSeek-V3."""
LATENT_MODEL: dict[str, Any] = {
    "head_dim": 24,
    "rotary_dim": 8,
    "latent_attention": LatentAttentionConfig(32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
}
"""Changes of `small_model`."""
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time, there was a")
SAMPLE_RUNS = (("eager", 0, False), ("graphs one after the other", 1, True), ("graphs", 1, False))
"""What a run is called, its number of graphs, and whether it reports log probabilities."""
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all samplers": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}


def checks(sizes: Sizes) -> Iterator[Check]:
    """Kernels, bits, engine and memory."""
    for dtype in sizes.dtypes:
        kind = str(dtype).removeprefix("torch.")
        yield f"attention, {kind}", partial(check_attention, dtype)
        yield f"attention to latents, {kind}", partial(check_latents, dtype)
        yield f"rows, {kind}", partial(check_rows, dtype)
    yield "engine's tokens, latents", partial(check_engine, small_model(**LATENT_MODEL), "latents, ")
    yield "bits of a request in other batches", partial(check_bits, sizes.dtypes[-1])
    yield "bits of products with fixed rows", partial(check_products, sizes)
    yield "sampled tokens", partial(check_sampler, sizes.vocabulary)
    yield "engine's tokens", partial(check_engine, small_model())
    yield "engine's tokens, SmolLM2", partial(check_sample_model, sizes)


def compared(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> Result:
    """By the norm of the difference."""
    wide = expected.double()
    error = float((found.cpu().double() - wide).norm() / wide.norm())
    limit = LIMITS[dtype]
    kind = str(dtype).removeprefix("torch.")
    return Result(f"{name}, {kind}", f"error {error:.1e}", f"{limit:.1e}", is_wrong=not error <= limit)


def check_attention(dtype: torch.dtype) -> Iterator[Result]:
    """Against float64."""
    for name, (lengths, heads, width, window, soft_cap) in ATTENTION.items():
        case = PagedCase.random(lengths, heads, width, 16, dtype)
        there = case.on(DEVICE)
        found = there.attend(window, soft_cap)
        cache = (there.cache[0].cpu(), there.cache[1].cpu())
        yield compared(f"attention: {name}", found, replace(case, cache=cache).expected(window, soft_cap), dtype)


def check_latents(dtype: torch.dtype) -> Iterator[Result]:
    """Against float64."""
    rotated, latent = 64, 512
    for name, (lengths, heads) in LATENTS.items():
        case = latents.random_case(lengths, heads, (rotated, latent), 16, dtype)
        there = case.on(DEVICE)
        found = latents.attend(there, latent)
        cache = (there.cache[0].cpu(), there.cache[1].cpu())
        wanted = latents.expected(replace(case, cache=cache), latent)
        yield compared(f"attention to latents: {name}", found, wanted, dtype)


def check_rows(dtype: torch.dtype) -> Iterator[Result]:
    """Norms and gates against float64."""
    generator = torch.Generator().manual_seed(5)
    given, update, weight = (torch.randn(*size, generator=generator).to(dtype) for size in ((3, 96), (3, 96), (96,)))
    there = [each.to(DEVICE) for each in (given, update, weight)]
    summed, normed = rows.add_and_normalize(there[0], there[1], 1.0, there[2], None, 1e-5, "rms")
    wide = summed.cpu().double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    yield compared("sum", summed, given.double() + update.double(), dtype)
    yield compared("norm", normed, expected, dtype)
    gate, value = given.double().chunk(2, dim=1)
    yield compared("gate of silu", rows.gated(there[0], "silu"), gate * gate.sigmoid() * value, dtype)


def check_bits(dtype: torch.dtype) -> Iterator[Result]:
    """A single token alone, beside a longer context, and beside a prompt."""
    alone = PagedCase.random(((90, 1),), (4, 2), 64, 16, dtype)
    others = [PagedCase.random(((90, 1), other), (4, 2), 64, 16, dtype) for other in ((521, 1), (7, 7))]
    bits = [case.with_first_of(alone).on(DEVICE).attend(None, None)[:1].cpu() for case in (alone, *others)]
    yield same_bits("bits of a request in other batches", bits)
    alone = latents.random_case(((90, 1),), 16, (64, 512), 16, dtype)
    cases = [latents.random_case(((90, 1), other), 16, (64, 512), 16, dtype) for other in ((321, 1), (3, 3))]
    bits = [latents.attend(case.with_first_of(alone).on(DEVICE), 512)[:1].cpu() for case in (alone, *cases)]
    yield same_bits("bits of a request in other batches, latents", bits)


def same_bits(name: str, bits: list[Tensor]) -> Result:
    """Whether all equal the first."""
    differing = sum(not torch.equal(bits[0], other) for other in bits[1:])
    return Result(name, f"{differing} of {len(bits) - 1} differ", "0", is_wrong=differing > 0)


def check_products(sizes: Sizes) -> Iterator[Result]:
    """A row alone, and at three places of a batch. On a CPU the bits depend on the place in a product."""
    generator, width = torch.Generator().manual_seed(5), int(sizes.model["hidden_size"])
    places = (5, FIXED_ROWS + 3, 2 * FIXED_ROWS + 43) if sizes.has_gpu else (0, FIXED_ROWS, 2 * FIXED_ROWS)
    weight = torch.randn(3 * width, width, generator=generator).to(DEVICE, sizes.dtype)
    batch = torch.randn(3 * FIXED_ROWS - 20, width, generator=generator)
    batch[list(places)] = batch[0].clone()
    batch = batch.to(DEVICE, sizes.dtype)
    alone = linear(batch[places[0] : places[0] + 1], weight, None, FIXED_ROWS).cpu()
    together = linear(batch, weight, None, FIXED_ROWS).cpu()
    differing = sum(not torch.equal(together[place], alone[0]) for place in places)
    yield Result("bits of products with fixed rows", f"{differing} of 3 differ", "0", is_wrong=differing > 0)


def check_sampler(vocabulary: int) -> Iterator[Result]:
    """Tokens of the device against those of the CPU; the edge of a top-p may be rounded differently."""
    count = 8
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    keys = noise_keys(np.arange(count, dtype=np.uint64), np.full(count, 7))
    truncations = (
        TopNSigma.of(np.full(count, 3, np.float32)),
        TopK.of(np.full(count, 50, np.int32)),
        TopP.of(np.full(count, 0.9, np.float32)),
        MinP.of(np.full(count, 0.01, np.float32)),
    )
    rules = SamplingRules(np.full(count, 0.8, np.float32), keys, truncations)
    there = logits.to(DEVICE)
    found = make_sampler(rules, vocabulary, there.device).sample(there).cpu().tolist()
    differing = sum(one != other for one, other in zip(found, sample(logits, rules).tolist(), strict=True))
    yield Result("sampled tokens", f"{differing} of {count} differ", "0", is_wrong=differing > 0)


def small_model(**changes: Any) -> Decoder:
    """Two layers of random weights that make the most likely token unambiguous."""
    sizes: dict[str, Any] = {"vocab_size": END + 1, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    sizes |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False}
    model = Decoder(ModelConfig(**({"architecture": "llama"} | sizes | changes)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(std=0.4, generator=generator)
    return model


def make_engine(model: Decoder, num_cuda_graphs: int, **options: Any) -> DynamicInferenceEngine:
    """With a small cache, and further settings."""
    tokenizer = Tokenizer(byte_backend(), location="bytes", eod=END)
    settings = InferenceConfig(
        kv_cache_memory_bytes=1 << 20,
        max_sequence_length=128,
        max_requests=3,
        num_cuda_graphs=num_cuda_graphs,
        cuda_graph_max_tokens=32,
        **options,
    )
    return DynamicInferenceEngine.build(model, tokenizer, settings)


def generate(model: Decoder, params: dict[str, Any], num_cuda_graphs: int = 0, **options: Any) -> list[list[int]]:
    """Tokens of two requests, which a graph pads by one; the prompt of the second is beside a token of the first."""
    engine = make_engine(model, num_cuda_graphs, **options)
    given = {"seed": 7, "num_tokens_to_generate": 4, "ignore_eos": True} | params
    futures = []
    for at in range(2):
        futures.append(engine.add_request(at, [65 + at] * (5 + 9 * at), SamplingParams(**given)))
        engine.step_modern()
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [future.result(timeout=0).merge().generated_tokens for future in futures]


def on_device(model: Decoder) -> Decoder:
    """A copy on the GPU."""
    there = Decoder(model.config, dtype=model.dtype, device=DEVICE)
    there.copy_from(model)
    return there


def same_tokens(
    name: str, found: list[list[int]], expected: list[list[int]], origin: str = "those of the CPU"
) -> Result:
    """The row of an engine's tokens beside others, whose ``origin`` it names."""
    words = "equal" if found == expected else f"{found} instead of {expected}"
    return Result(name, words, origin, is_wrong=found != expected)


def check_sample_model(sizes: Sizes) -> Iterator[Result]:
    """Greedy tokens of SmolLM2 in float32, if it is at hand: those of log probabilities begin no next pass."""
    name, path = "engine's tokens, SmolLM2", models_folder() / MODEL
    if not sizes.has_gpu or not path.exists():
        yield Result(name, "not run: " + (f"{path} is missing" if sizes.has_gpu else "it takes too long without a GPU"))
        return
    model, tokenizer = load_model(path, dtype="float32"), load_tokenizer(path)
    prompts = [tokenizer.tokenize(text) for text in PROMPTS]
    expected = sample_tokens(model, tokenizer, prompts, 0)
    for kind, num_cuda_graphs, scored in SAMPLE_RUNS:
        found = sample_tokens(on_device(model), tokenizer, prompts, num_cuda_graphs, scored=scored)
        yield same_tokens(f"{name}, {kind}", found, expected)


def sample_tokens(
    model: Decoder, tokenizer: Tokenizer, prompts: list[list[int]], num_cuda_graphs: int, *, scored: bool = False
) -> list[list[int]]:
    """Greedy answers to the prompts, in one batch."""
    config = InferenceConfig(
        kv_cache_memory_bytes=64 << 20, max_sequence_length=256, max_requests=4, num_cuda_graphs=num_cuda_graphs
    )
    engine = DynamicInferenceEngine.build(model, tokenizer, config)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=16, return_log_probs=scored)
    params.skip_prompt_log_probs = scored
    return [record.merge().generated_tokens for record in engine.generate(prompts, params)]


def check_engine(model: Decoder, kind_of_model: str = "") -> Iterator[Result]:
    """Its tokens in float32, of eager passes and of CUDA graphs, against those of the CPU."""
    for name, params in SAMPLERS.items():
        expected = generate(model, params)
        for kind, num_cuda_graphs in (("eager", 0), ("graphs", 1)):
            found = generate(on_device(model), params, num_cuda_graphs)
            yield same_tokens(f"engine's tokens, {kind_of_model}{name}, {kind}", found, expected)

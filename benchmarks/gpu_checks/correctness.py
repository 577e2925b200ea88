"""Whether kernels and engine compute the right thing, with the cases of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_support import latents
from gpu_support.attention_shapes import SHAPES
from gpu_support.paged import PagedCase
from gpu_support.row_references import clamped_gate, norm_of
from runtime_support.byte_backend import END, byte_backend
from torch import Tensor

from gpu_checks import sampling
from gpu_checks.results import DEVICE, Check, Result, Sizes
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.gpu import rows
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.launch.sample_model import MODEL, models_folder
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.config import LatentAttentionConfig, ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.products import FIXED_ROWS, linear
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative errors of a kernel, by type: of the norm of the result."""
ATTENTION = (
    "single tokens",
    "prompts and single tokens",
    "soft cap and window, width 64",
    "width 256, several splits",
)
"""Names of SHAPES."""
MORE_ATTENTION = (
    "single tokens, group of 3, width 80",
    "single tokens, window within a split",
    "prompts, group of 4, width 80",
    "prompts, group of 5, width 96",
    "windows",
    "sinks",
    "chunks and sinks",
    "several splits, chunks",
    "several splits, soft cap, window and sinks",
)
"""The same, for one type: each has one or two kernels of its own, whose compilation takes about a second each."""
LATENTS: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "single tokens": (((1, 1), (17, 1), (40, 1)), 16),
    "prompts and single tokens": (((20, 1), (13, 7), (5, 5)), 16),
    "heads in several programs, several splits": (((300, 1),), 40),
}
"""Lengths and new tokens, and heads; with the widths of DeepSeek-V3."""
LATENT_MODEL: dict[str, Any] = {
    "head_dim": 24,
    "rotary_dim": 8,
    "latent_attention": LatentAttentionConfig(32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
}
"""Changes of `small_model`."""
DEEPSEEK = latents.LatentShape(512, 128, 128, is_interleaved=True)
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time, there was a")
RUNS = (("eager", 0, False), ("graphs one after the other", 1, True), ("graphs", 1, False))
"""What a run is called, its number of graphs, and whether it reports log probabilities."""
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all samplers": {
        **{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
        **{"frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {66: 1.0}},
    },
}
PENALTIES = {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
"""Parameters with which the next pass begins before the host knows the tokens of the last one."""
SCORED = {"return_log_probs": True, "skip_prompt_log_probs": True}


def checks(sizes: Sizes) -> Iterator[Check]:
    """Kernels, bits, engine and memory."""
    for dtype in sizes.dtypes:
        kind = str(dtype).removeprefix("torch.")
        more = MORE_ATTENTION if dtype is sizes.dtypes[-1] else ()
        yield f"attention, {kind}", partial(check_attention, dtype, (*ATTENTION, *more))
        yield f"attention to latents, {kind}", partial(check_latents, dtype)
        yield f"rows, {kind}", partial(check_rows, dtype)
    yield "engine's tokens, latents", partial(check_engine, small_model(**LATENT_MODEL), "latents, ")
    yield "bits of a request in other batches", partial(check_bits, sizes.dtypes[-1])
    yield "bits of products with fixed rows", partial(check_products, sizes)
    yield from sampling.checks(sizes)
    yield "engine's tokens", partial(check_engine, small_model())
    yield "engine's tokens, penalties", check_penalties
    yield "engine's tokens, SmolLM2", partial(check_sample_model, sizes)


def compared(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> Result:
    """By the norm of the difference."""
    wide = expected.double()
    error = float((found.cpu().double() - wide).norm() / wide.norm())
    limit = LIMITS[dtype]
    kind = str(dtype).removeprefix("torch.")
    return Result(f"{name}, {kind}", f"error {error:.1e}", f"{limit:.1e}", is_wrong=not error <= limit)


def check_attention(dtype: torch.dtype, names: Iterable[str]) -> Iterator[Result]:
    """Against float64, with these of SHAPES."""
    for name in names:
        shape = SHAPES[name]
        case = shape.case(dtype)
        there = case.on(DEVICE)
        found = there.attend(*shape.limits(DEVICE))
        cache = (there.cache[0].cpu(), there.cache[1].cpu())
        yield compared(f"attention: {name}", found, replace(case, cache=cache).expected(*shape.limits()), dtype)


def check_latents(dtype: torch.dtype) -> Iterator[Result]:
    """Against float64."""
    for name, (lengths, heads) in LATENTS.items():
        case = latents.random_case(lengths, heads, (64, DEEPSEEK.latent), 16, dtype)
        there = case.on(DEVICE)
        found = latents.attend(there, DEEPSEEK)
        cache = (there.cache[0].cpu(), there.cache[1].cpu())
        wanted = latents.expected(replace(case, cache=cache), DEEPSEEK)
        yield compared(f"attention to latents: {name}", found, wanted, dtype)


def check_rows(dtype: torch.dtype) -> Iterator[Result]:
    """Norms and gates against float64."""
    generator = torch.Generator().manual_seed(5)
    given, update, weight = (torch.randn(*size, generator=generator).to(dtype) for size in ((3, 96), (3, 96), (96,)))
    there = [each.to(DEVICE) for each in (given, update, weight)]
    summed, normed = rows.add_and_normalize(there[0], there[1], 1.0, there[2], None, 1e-5, "rms")
    yield compared("sum", summed, given.double() + update.double(), dtype)
    yield compared("norm", normed, norm_of(summed.cpu(), weight), dtype)
    added, normed = rows.add_and_normalize(*there[:2], 1.0, there[2], None, 1e-5, "rms", (there[2], None))
    yield compared("sum with a norm", added, given.double() + norm_of(update, weight), dtype)
    yield compared("norm of a sum with a norm", normed, norm_of(added.cpu(), weight), dtype)
    projections, weights = there[0].clone(), (there[2][:64], there[2][64:80])
    rows.normalize_projections_(projections, (64, 16), weights, 1e-5, "rms")
    parts = given.split((64, 16, 16), dim=1), weight.split((64, 16, 16))
    expected = torch.cat([*map(norm_of, *(part[:2] for part in parts)), parts[0][2].double()], 1)
    yield compared("norms of projections", projections, expected, dtype)
    gate, value = given.double().chunk(2, dim=1)
    yield compared("gate of silu", rows.gated(there[0], "silu"), gate * gate.sigmoid() * value, dtype)
    found, expected = rows.gated(there[0], "silu", (1.7, 0.5)), clamped_gate(gate, value, 1.7, 0.5)
    yield compared("clamped gate", found, expected, dtype)


def check_bits(dtype: torch.dtype) -> Iterator[Result]:
    """A single token alone, beside a longer context, and beside a prompt."""
    alone = PagedCase.random(((90, 1),), (4, 2), 64, 16, dtype)
    others = [PagedCase.random(((90, 1), other), (4, 2), 64, 16, dtype) for other in ((521, 1), (7, 7))]
    bits = [case.with_first_of(alone).on(DEVICE).attend(None, None)[:1].cpu() for case in (alone, *others)]
    yield same_bits("bits of a request in other batches", bits)
    alone = latents.random_case(((90, 1),), 16, (64, 512), 16, dtype)
    cases = [latents.random_case(((90, 1), other), 16, (64, 512), 16, dtype) for other in ((321, 1), (3, 3))]
    bits = [latents.attend(case.with_first_of(alone).on(DEVICE), DEEPSEEK)[:1].cpu() for case in (alone, *cases)]
    yield same_bits("bits of a request in other batches, latents", bits)
    # Of several splits, which are merged where the values are computed, or before.
    alone = latents.random_case(((521, 1),), 16, (64, 512), 16, dtype)
    beside = latents.random_case(((521, 1), (3, 3)), 16, (64, 512), 16, dtype).with_first_of(alone)
    bits = [latents.attend(case.on(DEVICE), DEEPSEEK)[:1].cpu() for case in (alone, beside)]
    yield same_bits("bits of a request beside a prompt, latents", bits)


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
    """Tokens of `answers`."""
    return [answer.generated_tokens for answer in answers(model, params, num_cuda_graphs, **options)]


def answers(
    model: Decoder, params: dict[str, Any], num_cuda_graphs: int = 0, **options: Any
) -> list[DynamicInferenceRequest]:
    """Those to two requests, which a graph pads by one; the prompt of the second is beside a token of the first."""
    engine = make_engine(model, num_cuda_graphs, **options)
    given = {"seed": 7, "num_tokens_to_generate": 4, "ignore_eos": True} | params
    futures = []
    for at in range(2):
        futures.append(engine.add_request(at, [65 + at] * (5 + 9 * at), SamplingParams(**given)))
        engine.step_modern()
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [future.result(timeout=0).merge() for future in futures]


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
    for kind, num_cuda_graphs, scored in RUNS:
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
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=16, **(SCORED if scored else {}))
    return [record.merge().generated_tokens for record in engine.generate(prompts, params)]


def check_penalties() -> Iterator[Result]:
    """The tokens of CUDA graphs, in which the device counts them for the next pass, against those of the CPU."""
    model = small_model()
    found, expected = answers(on_device(model), PENALTIES, 1), answers(model, PENALTIES)
    tokens, wanted = ([each.generated_tokens for each in part] for part in (found, expected))
    yield same_tokens("engine's tokens, penalties, graphs", tokens, wanted)


def check_engine(model: Decoder, kind_of_model: str = "") -> Iterator[Result]:
    """Its tokens in float32, of eager passes and of CUDA graphs, against those of the CPU, and log probabilities."""
    for sampler, params in SAMPLERS.items():
        expected = answers(model, params | SCORED)
        for kind, num_cuda_graphs, scored in RUNS:
            name = f"{kind_of_model}{sampler}, {kind}"
            found = answers(on_device(model), params | (SCORED if scored else {}), num_cuda_graphs)
            tokens, wanted = ([each.generated_tokens for each in part] for part in (found, expected))
            yield same_tokens(f"engine's tokens, {name}", tokens, wanted)
            if scored and tokens == wanted:
                scores, others = (
                    torch.tensor([each.generated_log_probs for each in part]) for part in (found, expected)
                )
                yield sampling.near_log_probs(f"engine's log probabilities, {name}", scores, others)

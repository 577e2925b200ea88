"""Matrices that stay in fp8: whether their kernels compute the right thing, and how fast products and models are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_support.float8 import Float8Case, quantize_linears
from gpu_support.float8_mixture import Float8Mixture
from torch.nn import functional

from gpu_checks.correctness import SAMPLERS, compared, generate, same_bits, same_tokens, small_model
from gpu_checks.mixtures import measure_passes, random_case
from gpu_checks.random_models import bytes_read, random_model, weight_bytes
from gpu_checks.results import DEVICE, Check, Result, Sizes, free_memory
from gpu_checks.speed import copied_bytes_per_second, decode, prefill, products_per_second, seconds
from megatron_runtime.gpu.experts import TILE_ROWS
from megatron_runtime.gpu.graphs import GraphRecorder
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.quantized.float8_linear import Float8Linear

CASES: dict[str, dict[str, Any]] = {
    "scales of rows, a bias": {"channels": 200, "size": 336, "is_biased": True},
    "blocks of 128 columns": {"channels": 264, "size": 336, "group": 128},
    "groups of 32 columns": {"channels": 136, "size": 160, "group": 32},
    "other bits": {"channels": 136, "size": 160, "kind": torch.float8_e5m2},
}
ROWS = (1, 60, 200)
"""Of inputs: one for each size of tiles."""
GROUPS: dict[str, int | None] = {"rows": None, "blocks": 128}
"""Columns that have one scale."""
MEASURED_ROWS = (1, 16, 64, 256, 2048)


def checks(sizes: Sizes) -> Iterator[Check]:
    """Kernels, bits and engine."""
    for dtype in sizes.dtypes:
        yield f"products with fp8, {dtype}", partial(check_results, dtype, sizes)
        yield f"experts in fp8, {dtype}", partial(check_experts, dtype, sizes)
    yield "bits with fp8 matrices", partial(check_bits, sizes)
    yield "engine's tokens, fp8 weights", partial(check_engine, sizes)


def measurements(sizes: Sizes) -> Iterator[Check]:
    """With one model after the other."""
    yield "speed of products with fp8", partial(measure_products, sizes)
    for kind, group in GROUPS.items():
        yield f"speed with fp8 weights, scales of {kind}", partial(measure_model, sizes, kind, group)
    yield "speed with experts in fp8", partial(measure_mixture, sizes)


def check_results(dtype: torch.dtype, sizes: Sizes) -> Iterator[Result]:
    """Against float64."""
    for name, options in CASES.items():
        for rows in ROWS if sizes.has_gpu else ROWS[:2]:
            case = Float8Case.random(rows, **options).as_type(dtype)
            yield compared(f"fp8: {name}, {rows} rows", case.on(DEVICE).multiply(), case.expected(), dtype)


def check_experts(dtype: torch.dtype, sizes: Sizes) -> Iterator[Result]:
    """Against float64, with all sizes of tiles."""
    case = random_case(sizes, dtype, tokens=50, experts=(8, 2), elsewhere=1)
    for kind, group in (("rows", None), ("groups", 32)):
        mixture = Float8Mixture.of(case, group)
        there = mixture.on(DEVICE)
        found = torch.cat([there.process(tile_rows).cpu() for tile_rows in TILE_ROWS])
        expected = mixture.case.expected().repeat(len(TILE_ROWS), 1)
        yield compared(f"fp8: experts, scales of {kind}", found, expected, dtype)


def check_bits(sizes: Sizes) -> Iterator[Result]:
    """Of a row alone, and at other places among others, with tiles of one size."""
    case = Float8Case.random(200 if sizes.has_gpu else 70, 200, 336, group=128).as_type(sizes.dtypes[-1]).on(DEVICE)
    few = [case.rows(start, stop).multiply()[7 - start].cpu() for start, stop in ((7, 8), (7, 20), (0, 16))]
    yield same_bits("bits of products with fp8, few rows", few)
    ranges = ((7, 8), (0, 20), (5, len(case.inputs)))
    fixed = [case.rows(start, stop).multiply(rows_are_fixed=True)[7 - start].cpu() for start, stop in ranges]
    yield same_bits("bits of products with fp8, fixed tiles", fixed)


def check_engine(sizes: Sizes) -> Iterator[Result]:
    """Its tokens in float32 against those of the CPU, which expands the matrices for each product."""
    model = small_model()
    quantize_linears(model, 32)
    expected = generate(model, SAMPLERS["greedy"])
    for kind, num_cuda_graphs in (("graphs", 1), ("eager", 0))[: 2 if sizes.has_gpu else 1]:
        there = Decoder(model.config, dtype=model.dtype, device=DEVICE)
        quantize_linears(there, 32)
        there.copy_from(model)
        found = generate(there, SAMPLERS["greedy"], num_cuda_graphs)
        yield same_tokens(f"engine's tokens, fp8 weights, {kind}", found, expected)


@torch.inference_mode()
def measure_products(sizes: Sizes) -> Iterator[Result]:
    """All products of a layer, as a CUDA graph, beside those of the library with expanded matrices."""
    free_memory(has_gpu=sizes.has_gpu)
    one = replace(sizes, model=sizes.model | {"num_layers": 1})
    expanded = [each for each in random_model(one).layers.modules() if isinstance(each, Linear)]
    for kind, group in GROUPS.items():
        model = random_model(one)
        quantize_linears(model.layers, group)
        linears = [each for each in model.layers.modules() if isinstance(each, Float8Linear)]
        for rows in MEASURED_ROWS if sizes.has_gpu else (1, 20):
            inputs = [torch.randn(rows, each.codes.shape[1], dtype=sizes.dtype, device=DEVICE) for each in linears]

            def work(chosen: list[Any], given: list[torch.Tensor] = inputs) -> None:
                for linear, rows_of in zip(chosen, given, strict=True):
                    linear(rows_of)

            took, other = (
                seconds(GraphRecorder(DEVICE).record(partial(work, chosen)).replay, sizes)
                for chosen in (linears, expanded)
            )
            elements = sum(each.codes.numel() for each in linears)
            rate = f"{elements / took / 1e9:.4g} GB/s of weights, {2 * elements * rows / took / 1e12:.3g} TFLOP/s"
            words = f"{took * 1e6:.4g} us, {rate}; expanded {other * 1e6:.4g} us"
            yield Result(f"fp8: products of a layer, {rows} rows, scales of {kind}", words)
    yield expansion(sizes, linears[0], sizes.prompt)


def expansion(sizes: Sizes, linear: Float8Linear, rows: int) -> Result:
    """A product by the kernel, and by the library after an expansion, for prompts: which of them should be used."""
    inputs = torch.randn(rows, linear.codes.shape[1], dtype=sizes.dtype, device=DEVICE)
    kernel = seconds(lambda: linear(inputs), sizes)
    library = seconds(lambda: functional.linear(inputs, linear.weight), sizes)
    words = f"{kernel * 1e3:.4g} ms; expanded by PyTorch, and multiplied by the library {library * 1e3:.4g} ms"
    return Result(f"fp8: one product, {rows} rows", words)


@torch.inference_mode()
def measure_model(sizes: Sizes, kind: str, group: int | None) -> Iterator[Result]:
    """The memory of the weights, a prefill and decode passes."""
    free_memory(has_gpu=sizes.has_gpu)
    bandwidth, flops = copied_bytes_per_second(sizes), products_per_second(sizes)
    model = random_model(sizes)
    expanded = weight_bytes(model)
    needed = bytes_read(model)
    quantize_linears(model.layers, group)
    free_memory(has_gpu=sizes.has_gpu)
    kept = weight_bytes(model)
    yield Result(f"fp8, scales of {kind}: weights", f"{kept / 1e9:.4g} GB, {kept / expanded:.1%} of expanded ones")
    read = bytes_read(model)
    results = [prefill(model, sizes, needed, flops)]
    batches = sizes.batches if sizes.has_gpu else sizes.batches[:1]
    results += [decode(model, sizes, requests, sizes.contexts[0], read, bandwidth) for requests in batches]
    for result in results:
        yield replace(result, name=f"fp8, scales of {kind}: {result.name}")


@torch.inference_mode()
def measure_mixture(sizes: Sizes) -> Iterator[Result]:
    """A model with experts, as `mixtures.measure`, with blocks of 128 columns."""
    free_memory(has_gpu=sizes.has_gpu)
    ceilings = copied_bytes_per_second(sizes), products_per_second(sizes)
    batches = sizes.batches if sizes.has_gpu else sizes.batches[:1]
    sizes = replace(sizes, model=sizes.mixture, batches=batches, contexts=sizes.contexts[:1])
    model = random_model(sizes)
    quantize_linears(model.layers, GROUPS["blocks"])
    free_memory(has_gpu=sizes.has_gpu)
    for result in measure_passes(model, sizes, *ceilings):
        yield replace(result, name=f"fp8 experts: {result.name}")

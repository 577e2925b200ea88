"""Compiles the kernels of matrices and caches in fp8: ``python compile_float8.py``, as `compile_ahead`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gpu_support.compile_ahead import CAPABILITIES, SMALLER, Case, attention_cases, compiled, expert_cases, resources

from megatron_runtime.gpu import attention, experts, float8, float8_kernels

POINTERS = {**dict.fromkeys(("output", "inputs", "bias"), "bf16"), "codes": "u8", "scales": "fp32"}
SHAPES = {16: ((4096, 128), (28672, 4096)), 64: ((4096, 128),), 128: ((4096, 128), (4096, 4096))}
"""By rows of a tile: rows of the matrix, and columns that have one scale, of the 4096 ones of an 8B model."""


def cases(capability: int) -> Iterator[Case]:
    """Products with all sizes of tiles."""
    for rows, shapes in SHAPES.items():
        for channels, group in shapes:
            sizes = float8.float8_sizes(capability, rows, channels, 2, is_grouped=group < 4096)
            constants: dict[str, Any] = {"SIZE": 4096, "CHANNELS": channels, "GROUP": group, "EXPONENT": 4}
            constants |= {"IS_NATIVE": capability >= float8.FIRST_NATIVE, "BIASED": True}
            constants |= {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.channels, "BLOCK_K": sizes.inner}
            constants["TOGETHER"] = float8.TILES_TOGETHER
            options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
            name = f"multiply_float8 {rows} {channels} {group}"
            yield name, float8_kernels.multiply_float8, constants, POINTERS, options


def cache_cases(capability: int) -> Iterator[Case]:
    """Attention with a cache in fp8, at the sizes of an 8B model, and of wider heads with limits."""
    if capability < float8.FIRST_NATIVE:
        return
    heads = ("128 plain",) if capability in SMALLER else ("128 plain", "256 limited")
    for name, kernel, constants, pointers, options in attention_cases(capability):
        if "keys" in pointers and (name.endswith(heads) or "store" in name):
            if "tiles" in name:
                width = constants["WIDTH_PAD"]
                constants["BLOCK_N"] = attention.tile_sizes(capability, width, 2, is_float8=True).keys
            yield f"{name} fp8", kernel, constants, pointers | dict.fromkeys(("keys", "values"), "u8"), options


def mixture_cases(capability: int) -> Iterator[Case]:
    """Products of experts with matrices in fp8, with blocks of 128, at the sizes of a 30B model."""
    if capability in SMALLER:
        return
    for name, kernel, constants, pointers, _ in expert_cases(capability):
        tile = next((rows for rows in experts.TILE_ROWS if f"_visits {rows} " in name), None)
        if tile is None or not name.endswith(" False" if "narrow" in name else " True"):
            continue
        sizes = experts.product_sizes(capability, tile, 2, is_float8=True)
        float8_only = {"GROUP": 128, "EXPONENT": 4, "IS_NATIVE": capability >= float8.FIRST_NATIVE}
        blocks = {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.columns, "BLOCK_K": sizes.inner}
        stages = {"num_warps": sizes.warps, "num_stages": sizes.stages}
        yield f"{name} fp8", kernel, constants | float8_only | blocks, pointers | {"matrices": "u8"}, stages


def main() -> None:
    """Compile all and print the result."""
    found = {}
    for arch in (*CAPABILITIES, *SMALLER):
        for name, kernel, constants, pointers, options in (*cases(arch), *cache_cases(arch), *mixture_cases(arch)):
            made = compiled(kernel, constants, pointers, options, arch)
            found[f"sm_{arch} {name}"] = resources(made.asm["cubin"]) | {
                "shared": made.metadata.shared,
                "conversions": made.asm["ptx"].count("cvt.rn.f16x2.e4m3x2"),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

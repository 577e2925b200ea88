"""Compiles the products with matrices in fp8 as `compile_ahead` does other kernels: ``python compile_float8.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gpu_support.compile_ahead import CAPABILITIES, SMALLER, Case, compiled, resources

from megatron_runtime.gpu import float8, float8_kernels

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


def main() -> None:
    """Compile all and print the result."""
    found = {}
    for arch in (*CAPABILITIES, *SMALLER):
        for name, kernel, constants, pointers, options in cases(arch):
            made = compiled(kernel, constants, pointers, options, arch)
            found[f"sm_{arch} {name}"] = resources(made.asm["cubin"]) | {
                "shared": made.metadata.shared,
                "conversions": made.asm["ptx"].count("cvt.rn.f16x2.e4m3x2"),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Compiles the kernels for several generations of GPUs without one, and reports what their programs need.

A process of its own, because the tests interpret the kernels: ``python compile_ahead.py``. It prints a JSON object of
the registers, the bytes of local memory (spills), and the bytes of shared memory of each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_runtime.gpu import (
    attention,
    attention_kernels,
    expert_kernels,
    experts,
    latent_attention,
    latent_attention_kernels,
    latent_product_kernels,
    merge_kernels,
    penalties,
    penalty_kernels,
    row_kernels,
    rows,
    sampling,
    sampling_kernels,
    truncation,
    truncation_kernels,
)
from megatron_runtime.gpu.launch import power_of_two

CAPABILITIES = (80, 90, 100)
SMALLER = (86, 120)
"""Those with less shared memory, for which only attention and the products of experts are compiled."""
MOST_VARIANTS = 90
"""The one of CAPABILITIES for which some kernels are also compiled with rarer options, and with numbers that are 1."""
FLOATS = dict.fromkeys(("scale", "soft_cap", "eps", "multiplier", "magnitude", "alpha", "limit"), "fp32")
STRIDES = ("block_stride", "head_stride", "row_stride", "compressed_stride")
TABLES = ("block_tables", "query_starts", "context_lengths")
SCORE_LIMITS = ("WINDOWED", "CHUNKED", "HAS_SINKS")
LIMITS: dict[str, dict[str, Any]] = {
    "plain": dict.fromkeys(SCORE_LIMITS, False),
    "limited": dict.fromkeys(SCORE_LIMITS, True),
    "capped": dict.fromkeys(SCORE_LIMITS, False),
    "capped_window": dict.fromkeys(SCORE_LIMITS, False) | {"WINDOWED": True},
}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


Case = tuple[str, Any, dict[str, Any], dict[str, str], dict[str, int]]
"""Name, kernel, constants, element types of its pointers, and options, as the engine launches them."""


@dataclass(frozen=True)
class Heads:
    """Heads of a model, for which the kernels of attention are compiled."""

    width: int
    kind: str
    """One of LIMITS; those whose name has "capped" have a soft cap."""
    group: int = 4
    dtype: str = "bf16"
    capabilities: tuple[int, ...] = (*CAPABILITIES, *SMALLER)


HEADS = (
    Heads(128, "plain"),
    Heads(64, "limited"),
    Heads(128, "limited"),
    Heads(256, "limited"),
    Heads(96, "plain", group=8, capabilities=(80, 90)),
    Heads(128, "capped", group=2, capabilities=(90, 100)),
    Heads(256, "capped_window", group=2, capabilities=(90, 100)),
    Heads(128, "plain", dtype="fp16", capabilities=(80,)),
    Heads(128, "plain", dtype="fp32", capabilities=(MOST_VARIANTS,)),
)
"""Those of 8B models and wider ones for all GPUs; others, also those of Gemma 2 and a width that is no power of two,
for some, because each case takes seconds."""


def attention_cases(capability: int) -> Iterator[Case]:
    """The kernels of attention, for HEADS."""
    splitting = {"SPLIT": attention.SPLIT, "MOST_SPLITS": attention.MOST_SPLITS}
    for heads in HEADS:
        if capability not in heads.capabilities:
            continue
        pad, group = power_of_two(heads.width), power_of_two(heads.group)
        tiles = attention.tile_sizes(capability, pad, ELEMENT_BYTES[heads.dtype])
        splits = attention.split_sizes(capability, pad, ELEMENT_BYTES[heads.dtype])
        common = {"HEADS": 32, "WIDTH": heads.width, "WIDTH_PAD": pad, "PAGE": 16} | LIMITS[heads.kind]
        common |= {"GROUP": heads.group, "CAPPED": "capped" in heads.kind}
        pointers = dict.fromkeys(("output", "queries", "keys", "values"), heads.dtype) | {"sinks": "fp32"}
        name = f"{heads.width} {heads.kind}" + (f" {heads.dtype}" if heads.dtype != "bf16" else "")
        yield (
            f"attend_tiles {name}",
            attention_kernels.attend_tiles,
            common | {"GROUP_PAD": group, "BLOCK_Q": tiles.rows // group, "BLOCK_N": tiles.keys},
            pointers,
            {"num_warps": tiles.warps, "num_stages": tiles.stages},
        )
        yield (
            f"attend_splits {name}",
            attention_kernels.attend_splits,
            common | splitting | {"GROUP_PAD": max(group, splits.rows), "BLOCK_N": splits.keys, "IS_WHOLE": False},
            pointers | {"partial": "fp32", "log_sums": "fp32"},
            {"num_warps": splits.warps, "num_stages": splits.stages},
        )
    merge = {"HEADS": 32, "WIDTH": 128, "WIDTH_PAD": 128} | splitting | LIMITS["limited"]
    pointers = {"output": "bf16", "partial": "fp32", "log_sums": "fp32", "sinks": "fp32"}
    yield "merge_splits", merge_kernels.merge_splits, merge, pointers, {"num_warps": 4}
    rotate = {"QUERY_HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "WIDTH_PAD": 128, "TURNED": 128, "PAGE": 16, "BLOCK_H": 8}
    names = ("rotated", "output", "heads", "cosines", "sines", "keys", "values")
    pointers = dict.fromkeys(names, "bf16") | {"slots": "i64"}
    yield "rotate_and_store", attention_kernels.rotate_and_store, rotate, pointers, {"num_warps": 4}


def latent_cases(capability: int) -> Iterator[Case]:
    """Attention to latents, at the sizes of DeepSeek-V3 on one GPU and on each of eight."""
    pointers = dict.fromkeys(("output", "rows", "cache"), "bf16") | {"partial": "fp32", "log_sums": "fp32"}
    kernels = latent_attention_kernels
    widths = {"LATENT": 512, "LATENT_PAD": 512, "ROTATED": 64, "ROTATED_PAD": 64}
    for heads, is_limited in ((128, False), (16, False), (16, True)):
        if is_limited and capability != MOST_VARIANTS:
            continue
        tiles = latent_attention.tile_sizes(capability, 2)
        splits = latent_attention.split_sizes(capability, heads, 2)
        common = {"HEADS": heads, "PAGE": 16, "WINDOWED": is_limited, "CAPPED": is_limited} | widths
        group = min(heads, tiles.rows)
        name = f"{heads} limited" if is_limited else f"{heads}"
        yield (
            f"attend_latent_tiles {name}",
            kernels.attend_latent_tiles,
            common | {"GROUP_PAD": group, "BLOCK_Q": tiles.rows // group, "BLOCK_N": tiles.keys},
            pointers,
            {"num_warps": tiles.warps, "num_stages": tiles.stages},
        )
        yield (
            f"attend_latent_splits {name}",
            kernels.attend_latent_splits,
            common
            | {"GROUP_PAD": min(heads, splits.rows), "BLOCK_N": splits.keys, "IS_WHOLE": False}
            | {"SPLIT": attention.SPLIT, "MOST_SPLITS": attention.MOST_SPLITS},
            pointers,
            {"num_warps": splits.warps, "num_stages": splits.stages},
        )
    for dtype in ("bf16", "fp32") if capability == MOST_VARIANTS else ("bf16",):
        yield from latent_product_cases(dtype)


def latent_product_cases(dtype: str) -> Iterator[Case]:
    """The products with the matrices of heads, at the same sizes."""
    names = ("rows", "queries", "compressed", "up", "weight", "cosines", "sines", "cache", "values")
    pointers = dict.fromkeys(names, dtype) | {"slots": "i64", "log_sums": "fp32"}
    common = {"HEADS": 128, "UP_ROWS": 256, "LATENT": 512, "LATENT_PAD": 512}
    sizes = latent_attention.product_sizes(ELEMENT_BYTES[dtype])
    absorb = {"HEAD_DIM": 192, "ROTATED": 64, "ROTATED_PAD": 64, "TURNED": 64, "INTERLEAVED": True, "PAGE": 16}
    absorb |= {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.columns, "BLOCK_K": sizes.inner}
    absorb |= {"KEYS": latent_attention.KEYS_TOGETHER} | common
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    yield f"absorb_and_store {dtype}", latent_product_kernels.absorb_and_store, absorb, pointers, options
    sizes = latent_attention.expansion_sizes(ELEMENT_BYTES[dtype], 512)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    for merges in (False, True):
        expand = {"WIDTH": 128, "BLOCK_M": sizes.rows, "BLOCK_N": sizes.columns, "WINDOWED": True, "MERGES": merges}
        expand |= {"SPLIT": attention.SPLIT, "MOST_SPLITS": attention.MOST_SPLITS} | common
        given = pointers | {"means": "fp32" if merges else dtype}
        name = f"merge_and_expand {merges} {dtype}"
        yield name, latent_product_kernels.merge_and_expand, expand, given, options


def row_cases() -> Iterator[Case]:
    """The same for operations on rows, at the sizes of an 8B model."""
    pointers = dict.fromkeys(("output", "summed", "rows", "updates", "weight", "bias"), "bf16")
    pointers |= dict.fromkeys(("update_weight", "update_bias"), "bf16")
    wide = {"num_warps": rows.warps_for(4096)}
    for kind, number in rows.NORMS.items():
        norm = {"SIZE": 4096, "SIZE_PAD": 4096, "KIND": number, "ADDS": True, "NORMALIZES_ROWS": True}
        for twice in (False, True):
            name = f"normalize_rows {kind}{' twice' * twice}"
            yield name, row_kernels.normalize_rows, norm | {"NORMALIZES_UPDATES": twice}, pointers, wide
    pointers = dict.fromkeys(("rows", "heads", "query_weight", "key_weight"), "bf16")
    norm = {"QUERIES": 4096, "QUERIES_PAD": 4096, "KEYS": 1024, "KEYS_PAD": 1024, "SIZE": 6144, "KIND": 0}
    yield "normalize_projections", row_kernels.normalize_projections, norm, pointers, wide
    for kind in ("rms", "rms_plus_one"):
        norm = {"QUERY_HEADS": 32, "NORMALIZED": 40, "ALL": 48, "WIDTH": 128, "WIDTH_PAD": 128}
        norm |= {"KIND": rows.NORMS[kind], "BLOCK_H": rows.HEADS_TOGETHER}
        yield f"normalize_heads {kind}", row_kernels.normalize_heads, norm, pointers, {"num_warps": 4}
    pointers = dict.fromkeys(("output", "gates_and_values"), "bf16")
    for activation, number in rows.ACTIVATIONS.items():
        gate = {"SIZE": 14336, "BLOCK": rows.GATE_BLOCK, "ACTIVATION": number, "CLAMPED": False}
        yield f"gate_rows {activation}", row_kernels.gate_rows, gate, pointers, {"num_warps": 4}
    yield "gate_rows clamped", row_kernels.gate_rows, gate | {"CLAMPED": True}, pointers, {"num_warps": 4}
    table = {"SIZE": 4096, "BLOCK": rows.GATE_BLOCK, "HAS_POSITIONS": True, "SCALED": True}
    pointers = dict.fromkeys(("output", "table", "learned"), "bf16") | {"tokens": "i64", "positions": "i64"}
    yield "look_up_rows", row_kernels.look_up_rows, table, pointers, {"num_warps": 4}
    pointers = dict.fromkeys(("output", "known", "sources", "sampled"), "i64")
    yield "choose_tokens", row_kernels.choose_tokens, {"BLOCK": rows.TOKEN_BLOCK}, pointers, {"num_warps": 1}
    pointers = {"cosines": "bf16", "sines": "bf16", "positions": "i64", "frequencies": "fp32"}
    yield "turn_positions", row_kernels.turn_positions, {"HALF": 64, "HALF_PAD": 64}, pointers, {"num_warps": 1}


def sampling_cases() -> Iterator[Case]:
    """The same for the sampler."""
    pointers = dict.fromkeys(("logits", "values", "best", "tops", "temperatures", "leasts"), "fp32")
    pointers |= dict.fromkeys(("sigmas", "top_ps", "min_ps"), "fp32")
    pointers |= dict.fromkeys(("places", "masks", "lows", "highs", "top_ks"), "i32")
    pointers |= {"rows": "i64", "tokens": "i64"}
    kernels, part, wide = sampling_kernels, {"PART": sampling.PART}, {"num_warps": sampling.WARPS}
    for operation, number in sampling.OPERATIONS.items():
        edit = {"OPERATION": number, "BLOCK": sampling.EDIT_BLOCK}
        yield f"edit_logits {operation}", kernels.edit_logits, edit, pointers | {"places": "i64"}, {"num_warps": 4}
    yield "exclude_tokens", kernels.exclude_tokens, part, pointers, wide
    yield "scan_rows", kernels.scan_rows, part, pointers, wide
    yield "finish_scan", kernels.finish_scan, {"PARTS": 32}, pointers, {"num_warps": 1}
    race = part | {"BLOCK": sampling.NOISE_BLOCK, "STREAM": sampling.NOISE_STREAM, "TRUNCATED": True}
    yield "race_tokens", kernels.race_tokens, race, pointers, wide
    yield "finish_race", kernels.finish_race, {"PARTS": 32}, pointers, {"num_warps": 1}
    lists = dict.fromkeys(("numbers", "lists", "sizes"), "i32")
    lists |= {"sampled": "i64", "logits": "fp32", "factors": "fp64"}
    options = {"num_warps": penalties.WARPS, "enable_fp_fusion": False}
    yield "penalize_counted", penalty_kernels.penalize_counted, {"BLOCK": penalties.BLOCK}, lists, options


def expert_cases(capability: int) -> Iterator[Case]:
    """The same for mixtures of experts, at the sizes of a 30B model of which each token uses 3B."""
    count, per_token, hidden, channels = 128, 8, 2048, 768
    pointers = dict.fromkeys(("output", "hidden", "inputs", "results", "logits", "matrices", "biases"), "bf16")
    pointers |= dict.fromkeys(("shared", "gates"), "bf16")
    pointers |= dict.fromkeys(("chosen", "replayed", "offsets", "bias_offsets", "scale_offsets"), "i64")
    pointers |= dict.fromkeys(("order", "starts"), "i32") | dict.fromkeys(("weights", "bias", "scales"), "fp32")
    every = {"COUNT": count, "COUNT_PAD": count, "GROUP": 0, "EXPONENT": 0, "IS_NATIVE": False}
    kernels = expert_kernels
    for groups in (1, 8):
        route = {"PER_TOKEN": per_token, "PER_TOKEN_PAD": per_token, "SIGMOID": groups > 1, "BIASED": groups > 1}
        route |= {"GROUPS": groups, "GROUPS_PAD": groups, "MEMBERS": 256 // groups, "MEMBERS_PAD": 256 // groups}
        route |= {"BEST_GROUPS": min(groups, 4), "SUMS_TWO": True, "REPLAYED": groups > 1, "NORMALIZES": True}
        route["ADDS_SHARED"] = groups > 1
        yield f"route_rows {groups}", kernels.route_rows, route, pointers, {"num_warps": 1}
    for block, warps in ((experts.SORT_BLOCK, 4), (experts.LONG_SORT_BLOCK, 8)):
        yield f"sort_visits {block}", kernels.sort_visits, {"BLOCK": block}, pointers, {"num_warps": warps}
    for tile_rows in experts.TILE_ROWS:
        sizes = experts.product_sizes(capability, tile_rows, 2)
        tile = every | {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.columns, "BLOCK_K": sizes.inner, "BIASED": True}
        options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
        for is_gated in (True, False):
            widen = {"PER_TOKEN": per_token, "SIZE": hidden, "CHANNELS": channels, "GATED": is_gated, "SINGLE": False}
            widen |= tile | {"ACTIVATION": rows.ACTIVATIONS["silu" if is_gated else "relu_squared"], "CLAMPED": False}
            yield f"widen_visits {tile_rows} {is_gated}", kernels.widen_visits, widen, pointers, options
        for is_single in (False, True):
            narrow = tile | {"SIZE": channels, "CHANNELS": hidden, "SINGLE": is_single}
            yield f"narrow_visits {tile_rows} {is_single}", kernels.narrow_visits, narrow, pointers, options
    total = {"COUNT": count, "PER_TOKEN": per_token, "SIZE": hidden, "BLOCK": experts.SUM_BLOCK, "WEIGHTED": True}
    for is_shared in (False, True):
        total |= {"SHARED": is_shared, "GATED": is_shared}
        yield f"sum_visits {is_shared}", kernels.sum_visits, total.copy(), pointers, {"num_warps": 4}


def truncation_cases() -> Iterator[Case]:
    """The same for truncations."""
    names = ("leasts", "logits", "tops", "temperatures", "sigmas", "top_ps", "min_ps")
    pointers = dict.fromkeys((*names, "maxima", "floors", "candidates", "statistics"), "fp32") | {"top_ks": "i32"}
    kernels, part = truncation_kernels, {"VOCABULARY_BLOCK": truncation.VOCABULARY_BLOCK, "PART": truncation.PART}
    capacity, block = {"CAPACITY": truncation.CAPACITY}, {"BLOCK": truncation.BLOCK}
    some, many = {"num_warps": truncation.PART_WARPS}, {"num_warps": truncation.WARPS}
    yield "find_block_maxima", kernels.find_block_maxima, part, pointers, some
    yield "find_floors", kernels.find_floors, block, pointers, many
    yield "collect_candidates", kernels.collect_candidates, part | capacity, pointers, some
    yield "truncate_rows", kernels.truncate_rows, {"PARTS": 32} | capacity | block, pointers, many


def cases(capability: int) -> Iterator[Case]:
    """All kernels."""
    yield from latent_cases(capability)
    yield from attention_cases(capability)
    yield from expert_cases(capability)
    if capability in SMALLER:
        return
    yield from row_cases()
    yield from sampling_cases()
    yield from truncation_cases()


def compiled(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], options: dict[str, int], arch: int
) -> Any:
    """The kernel for GPUs of a compute capability, with pointers and strides that are multiples of 16."""
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = "i32"
        if name in constants:
            kind = "constexpr"
        elif name in pointers:
            kind = f"*{pointers[name]}"
        elif name in FLOATS:
            kind = FLOATS[name]
        elif name in TABLES:
            kind = "*i32"
        if kind.startswith("*") or name in STRIDES:
            aligned[(place,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def numbers_of(kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> list[str]:
    """The numbers that are constants of the program when they are 1."""
    others = {*constants, *pointers, *FLOATS, *STRIDES, *TABLES}
    return [each.name for each in kernel.params if each.name not in others and not each.do_not_specialize]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of local and of shared memory."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = RESOURCES.search(text)
    assert found is not None, text
    registers, stack, shared, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local, "shared": shared}


def main() -> None:
    """Compile all and print the result."""
    found = {}
    for arch in (*CAPABILITIES, *SMALLER):
        for name, kernel, constants, pointers, options in cases(arch):
            made = compiled(kernel, constants, pointers, options, arch)
            found[f"sm_{arch} {name}"] = resources(made.asm["cubin"]) | {"shared": made.metadata.shared}
            if arch == MOST_VARIANTS and (ones := numbers_of(kernel, constants, pointers)):
                compiled(kernel, constants | dict.fromkeys(ones, 1), pointers, options, arch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

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
    row_kernels,
    rows,
    sampling,
    sampling_kernels,
    truncation,
    truncation_kernels,
)

CAPABILITIES = (80, 90, 100)
SMALLER = (86, 120)
"""Those with less shared memory, for which only attention and the products of experts are compiled."""
FLOATS = dict.fromkeys(("scale", "soft_cap", "eps", "multiplier", "magnitude", "alpha", "limit"), "fp32")
STRIDES = ("block_stride", "head_stride")
TABLES = ("block_tables", "query_starts", "context_lengths")
LIMITS: dict[str, dict[str, Any]] = {
    kind: dict.fromkeys(("WINDOWED", "CHUNKED", "HAS_SINKS"), kind == "limited") for kind in ("plain", "limited")
}
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


Case = tuple[str, Any, dict[str, Any], dict[str, str], dict[str, int]]
"""Name, kernel, constants, element types of its pointers, and options, as the engine launches them."""


def attention_cases(capability: int) -> Iterator[Case]:
    """The kernels of attention, at the sizes of an 8B model and of wider heads."""
    splitting = {"SPLIT": attention.SPLIT, "MOST_SPLITS": attention.MOST_SPLITS}
    for width, kind in ((128, "plain"), (64, "limited"), (128, "limited"), (256, "limited")):
        common = {"HEADS": 32, "WIDTH": width, "WIDTH_PAD": width, "PAGE": 16} | LIMITS[kind]
        tiles, splits = (sizes(capability, width, 2) for sizes in (attention.tile_sizes, attention.split_sizes))
        group = {"GROUP": 4, "GROUP_PAD": 4, "CAPPED": False}
        pointers = dict.fromkeys(("output", "queries", "keys", "values"), "bf16") | {"sinks": "fp32"}
        yield (
            f"attend_tiles {width} {kind}",
            attention_kernels.attend_tiles,
            common | group | {"BLOCK_Q": tiles.rows // 4, "BLOCK_N": tiles.keys},
            pointers,
            {"num_warps": tiles.warps, "num_stages": tiles.stages},
        )
        yield (
            f"attend_splits {width} {kind}",
            attention_kernels.attend_splits,
            common | group | {"GROUP_PAD": splits.rows, "BLOCK_N": splits.keys, "IS_WHOLE": False} | splitting,
            pointers | {"partial": "fp32", "log_sums": "fp32"},
            {"num_warps": splits.warps, "num_stages": splits.stages},
        )
    merge = {"HEADS": 32, "WIDTH": 128, "WIDTH_PAD": 128} | splitting | LIMITS["limited"]
    pointers = {"output": "bf16", "partial": "fp32", "log_sums": "fp32", "sinks": "fp32"}
    yield "merge_splits", attention_kernels.merge_splits, merge, pointers, {"num_warps": 4}
    rotate = {"QUERY_HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "WIDTH_PAD": 128, "TURNED": 128, "PAGE": 16, "BLOCK_H": 8}
    pointers = dict.fromkeys(("rotated", "output", "heads", "cosines", "sines", "keys", "values"), "bf16") | {
        "slots": "i64"
    }
    yield "rotate_and_store", attention_kernels.rotate_and_store, rotate, pointers, {"num_warps": 4}


def latent_cases(capability: int) -> Iterator[Case]:
    """Attention to latents, at the sizes of DeepSeek-V3 on one GPU and on each of eight."""
    pointers = dict.fromkeys(("output", "rows", "queries", "compressed", "weight", "cosines", "sines", "cache"), "bf16")
    pointers |= {"slots": "i64", "partial": "fp32", "log_sums": "fp32"}
    kernels, paged = latent_attention_kernels, {"PAGE": 16, "WINDOWED": False, "CAPPED": False}
    widths = {"LATENT": 512, "LATENT_PAD": 512, "ROTATED": 64, "ROTATED_PAD": 64}
    for heads in (128, 16):
        tiles = latent_attention.tile_sizes(capability, 2)
        splits = latent_attention.split_sizes(capability, heads, 2)
        common, group = {"HEADS": heads} | widths | paged, min(heads, tiles.rows)
        yield (
            f"attend_latent_tiles {heads}",
            kernels.attend_latent_tiles,
            common | {"GROUP_PAD": group, "BLOCK_Q": tiles.rows // group, "BLOCK_N": tiles.keys},
            pointers,
            {"num_warps": tiles.warps, "num_stages": tiles.stages},
        )
        yield (
            f"attend_latent_splits {heads}",
            kernels.attend_latent_splits,
            common
            | {"GROUP_PAD": min(heads, splits.rows), "BLOCK_N": splits.keys, "IS_WHOLE": False}
            | {"SPLIT": attention.SPLIT, "MOST_SPLITS": attention.MOST_SPLITS},
            pointers,
            {"num_warps": splits.warps, "num_stages": splits.stages},
        )
    filled = {"HEADS": 128, "HEAD_DIM": 192, "INTERLEAVED": True, "BLOCK_H": latent_attention.HEADS_TOGETHER} | widths
    yield "fill_latent_rows", kernels.fill_latent_rows, filled, pointers, {"num_warps": 4}
    rotated = {"HEADS": 128, "WIDTH": 576, "WIDTH_PAD": 1024, "TURNED": 64, "TURNED_PAD": 64, "PAGE": 16}
    rotated |= {"BLOCK_H": latent_attention.HEADS_TOGETHER, "LATENT": 512, "LATENT_PAD": 512}
    yield "rotate_and_store_latents", kernels.rotate_and_store_latents, rotated, pointers, {"num_warps": 4}


def row_cases() -> Iterator[Case]:
    """The same for operations on rows, at the sizes of an 8B model."""
    pointers = dict.fromkeys(("output", "summed", "rows", "updates", "weight", "bias"), "bf16")
    for kind, number in rows.NORMS.items():
        norm = {"SIZE": 4096, "SIZE_PAD": 4096, "KIND": number, "ADDS": True}
        yield f"normalize_rows {kind}", row_kernels.normalize_rows, norm, pointers, {"num_warps": rows.warps_for(4096)}
    pointers = dict.fromkeys(("heads", "query_weight", "key_weight"), "bf16")
    for kind in ("rms", "rms_plus_one"):
        norm = {"QUERY_HEADS": 32, "NORMALIZED": 40, "ALL": 48, "WIDTH": 128, "WIDTH_PAD": 128}
        norm |= {"KIND": rows.NORMS[kind], "BLOCK_H": rows.HEADS_TOGETHER}
        yield f"normalize_heads {kind}", row_kernels.normalize_heads, norm, pointers, {"num_warps": 4}
    pointers = dict.fromkeys(("output", "gates_and_values"), "bf16")
    for activation, number in rows.ACTIVATIONS.items():
        gate = {"SIZE": 14336, "BLOCK": rows.GATE_BLOCK, "ACTIVATION": number}
        yield f"gate_rows {activation}", row_kernels.gate_rows, gate, pointers, {"num_warps": 4}
    table = {"SIZE": 4096, "BLOCK": rows.GATE_BLOCK, "HAS_POSITIONS": True, "SCALED": True}
    pointers = dict.fromkeys(("output", "table", "learned"), "bf16") | {"tokens": "i64", "positions": "i64"}
    yield "look_up_rows", row_kernels.look_up_rows, table, pointers, {"num_warps": 4}
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


def expert_cases(capability: int) -> Iterator[Case]:
    """The same for mixtures of experts, at the sizes of a 30B model of which each token uses 3B."""
    count, per_token, hidden, channels = 128, 8, 2048, 768
    pointers = dict.fromkeys(("output", "hidden", "inputs", "results", "logits", "matrices", "biases"), "bf16")
    pointers |= dict.fromkeys(("chosen", "replayed", "offsets", "bias_offsets", "scale_offsets"), "i64")
    pointers |= dict.fromkeys(("order", "starts"), "i32") | dict.fromkeys(("weights", "bias", "scales"), "fp32")
    every = {"COUNT": count, "COUNT_PAD": count, "GROUP": 0, "EXPONENT": 0, "IS_NATIVE": False}
    kernels = expert_kernels
    for groups in (1, 8):
        route = {"PER_TOKEN": per_token, "PER_TOKEN_PAD": per_token, "SIGMOID": groups > 1, "BIASED": groups > 1}
        route |= {"GROUPS": groups, "GROUPS_PAD": groups, "MEMBERS": 256 // groups, "MEMBERS_PAD": 256 // groups}
        route |= {"BEST_GROUPS": min(groups, 4), "SUMS_TWO": True, "REPLAYED": groups > 1, "NORMALIZES": True}
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
    yield "sum_visits", kernels.sum_visits, total, pointers, {"num_warps": 4}


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
            if arch == 90 and (ones := numbers_of(kernel, constants, pointers)):
                compiled(kernel, constants | dict.fromkeys(ones, 1), pointers, options, arch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

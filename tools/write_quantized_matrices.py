"""Writes the quantized matrices in ``tests/runtime/data/quantized``, with the libraries that define their formats.

Requires ``compressed-tensors==0.20.0``, ``auto-gptq==0.7.1`` and ``autoawq==0.2.9`` with what they import, in an
environment of their own: the project and its tests do not need them. Needs no accelerator. Each file has the tensors of
one matrix [64, 64] as a library stores them, ``expected`` with the weights as the same library computes them, and the
``quantization_config`` in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "runtime" / "data" / "quantized"
SIZE = 64
GROUP = 16
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed_int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    "packed_int4_asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "packed_int8_rows_asymmetric": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8_rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "float8_rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8_blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]},
    ),
}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    for name, (form, arguments) in COMPRESSED.items():
        write(name, *compress(form, arguments))
    for bits in (4, 8):
        write(f"gptq_int{bits}", *pack_gptq(bits, in_order=True))
    write("gptq_int4_desc_act", *pack_gptq(4, in_order=False))
    write("awq", *pack_awq())


def write(name: str, stored: dict[str, Tensor], expected: Tensor, settings: dict[str, Any]) -> None:
    """One file."""
    tensors = {key: each.contiguous() for key, each in (stored | {"expected": expected}).items()}
    save_file(tensors, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(settings)})


def compress(form: str, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A matrix that compressed-tensors compresses, with scales for blocks of it."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    rows, columns = arguments.get("block_structure", (1, arguments.get("group_size", SIZE)))
    top = 448 if arguments.get("type") == "float" else (1 << arguments["num_bits"]) - 1
    matrix = torch.randn(SIZE, SIZE)
    blocks = matrix.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    low, high = blocks.amin((1, 3)).clamp(max=0.0), blocks.amax((1, 3)).clamp(min=0.0)
    given = {"weight": matrix, "weight_scale": torch.maximum(-low, high) * (1 if top == 448 else 2) / top}
    if not arguments.get("symmetric", True):
        given["weight_scale"] = (high - low) / top
        zeros = torch.round(-low / given["weight_scale"]) - (top + 1) // 2
        given["weight_zero_point"] = zeros.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(given, scheme)
    group = {"targets": ["Linear"], "weights": json.loads(scheme.weights.model_dump_json())}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return stored, compressor.decompress(stored, scheme)["weight"], settings


def scales_of(matrix: Tensor, bits: int, group_of_column: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points, [rows, groups]; no zero point is 0, which the first version of GPTQ can't store."""
    top = (1 << bits) - 1
    groups = [matrix[:, group_of_column == group] for group in range(SIZE // GROUP)]
    low = torch.stack([each.amin(1) for each in groups], 1).clamp(max=-0.5)
    high = torch.stack([each.amax(1) for each in groups], 1).clamp(min=0.5)
    scales = ((high - low) / top).half().float()
    return scales, torch.round(-low / scales)


def pack_gptq(bits: int, *, in_order: bool) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A matrix that AutoGPTQ packs; its weights are its product with the identity."""
    linear = nn.Linear(SIZE, SIZE, bias=False)
    groups = (torch.arange(SIZE) if in_order else torch.randperm(SIZE)) // GROUP
    matrix = linear.weight.data.normal_()
    scales, zeros = scales_of(matrix, bits, groups)
    packed = QuantLinear(bits, GROUP, SIZE, SIZE, bias=False)
    packed.pack(linear, scales, zeros, groups.int())
    packed.scales = packed.scales.half()
    stored = {
        name: each for name, each in packed.state_dict().items() if name in ("qweight", "qzeros", "scales", "g_idx")
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, "desc_act": not in_order}
    packed.scales = packed.scales.float()
    return stored, packed(torch.eye(SIZE)).detach().t(), settings


def pack_awq() -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A matrix that AutoAWQ packs."""
    linear = nn.Linear(SIZE, SIZE, bias=False)
    scales, zeros = scales_of(linear.weight.data.normal_(), 4, torch.arange(SIZE) // GROUP)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    stored = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP)
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return stored, expected.t(), settings


if __name__ == "__main__":
    main()

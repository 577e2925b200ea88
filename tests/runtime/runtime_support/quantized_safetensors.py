"""Writes small quantized safetensors checkpoints by the definitions of their formats, with exact reference weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_runtime.model.checkpoint import load_model

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]
"""From a matrix [out, in] to its stored tensors, by the ends of their names, and the float64 weights that they mean."""
LLAMA = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 2,
}
"""Sizes of a model whose matrices have different shapes, multiples of 32."""
_PLAIN = re.compile(r"(embed_tokens|lm_head|norm|mlp\.gate|router|block_sparse_moe\.gate)\.weight$")


@dataclass(frozen=True)
class QuantizedPair:
    """A quantized checkpoint, and a plain one with the weights that it means."""

    quantized: Path
    plain: Path
    weights: Tensors
    """The weights of the quantized matrices, float64, by name."""


def quantize_folder(
    plain: Path, quantize: Quantize, settings: dict[str, Any], *, files: int = 1, also: tuple[str, ...] = ()
) -> QuantizedPair:
    """Quantize all linear layers of the checkpoint in ``plain``, whose weights become those of the quantized one.

    Args:
        plain: Holds a ``model.safetensors``, which is rewritten.
        quantize: For each matrix.
        settings: Becomes the ``quantization_config``.
        also: Ends of the names of other matrices to quantize.
        files: Number of files of the result. Tensors of one matrix may be in several.
    """
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    weights: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight") or (_PLAIN.search(name) and not name.endswith(also)):
            stored[name] = tensor
            continue
        coded, weights[name] = quantize(tensor)
        stored |= {
            f"{name.removesuffix('weight')}{ending}": part.contiguous().clone() for ending, part in coded.items()
        }
    save_file(
        tensors | {name: weight.float().contiguous() for name, weight in weights.items()}, plain / "model.safetensors"
    )
    folder = plain.with_name(f"{plain.name}-quantized")
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(stored, folder / "model.safetensors")
        return QuantizedPair(folder, plain, weights)
    placed = {name: f"model-{number % files}.safetensors" for number, name in enumerate(stored)}
    for file in set(placed.values()):
        save_file({name: stored[name] for name in stored if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return QuantizedPair(folder, plain, weights)


def spread(grid: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Each number of a grid for all elements of its block, float64 with ``shape``."""
    tall = grid.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return tall[: shape[0], : shape[1]]


def to_float8(
    block: tuple[int, int] | None = None,
    *,
    name: str = "weight_scale",
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
    scale_shape: tuple[int, ...] | None = None,
    further: Tensors | None = None,
) -> Quantize:
    """Scales for blocks of rows and columns; a block without a size takes all of that dimension.

    Args:
        block: Rows and columns, 0 for all of them; None is one scale for all weights.
        name: The end of the name of the scales.
        dtype: Of the codes.
        scale_dtype: Of the scales.
        scale_shape: Shape of the stored scales, if it is another than that of the grid.
        further: Other tensors of each module.
    """

    def quantize(matrix: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = matrix.shape
        size = (block or (0, 0))[0] or rows, (block or (0, 0))[1] or columns
        padded = torch.nn.functional.pad(matrix.abs(), (0, -columns % size[1], 0, -rows % size[0]))
        grid = padded.unflatten(0, (-1, size[0])).unflatten(2, (-1, size[1])).amax((1, 3)) / torch.finfo(dtype).max
        # A power of two above it, as E8M0 requires, so that no code overflows.
        grid = torch.exp2(torch.ceil(torch.log2(grid))) if scale_dtype.itemsize == 1 else grid * 1.01
        grid = grid.to(scale_dtype)
        scales = spread(grid.float(), size, matrix.shape)
        codes = (matrix.double() / scales).to(dtype)
        stored = grid if scale_shape is None else grid.reshape(scale_shape)
        return {"weight": codes, name: stored} | (further or {}), codes.double() * scales

    return quantize


@dataclass(frozen=True)
class IntegerCodes:
    """A matrix as unsigned codes, with a scale and a zero point for each row and group: float64 or int64."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    """The group of each column."""

    @classmethod
    def of(
        cls, matrix: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, shuffled: bool = False
    ) -> IntegerCodes:
        """Round to the nearest code. A group of 0 has all columns; shuffled groups have columns in any order."""
        rows, columns = matrix.shape
        groups = torch.arange(columns) // (group or columns)
        if shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        scales, zeros = [], []
        top = (1 << bits) - 1
        for number in range(int(groups.max()) + 1):
            part = matrix[:, groups == number].double()
            low, high = part.amin(1).clamp(max=0.0), part.amax(1).clamp(min=0.0)
            if symmetric:
                scale = (2 * torch.maximum(-low, high) / top).clamp(min=1e-4).to(dtype).double()
                zero = torch.full((rows,), 1 << (bits - 1))
            else:
                scale = ((high - low) / top).clamp(min=1e-4).to(dtype).double()
                zero = torch.round(-low / scale).clamp(0, top).long()
            scales.append(scale)
            zeros.append(zero)
        made = cls(torch.empty(0), torch.stack(scales, 1), torch.stack(zeros, 1), groups)
        codes = torch.round(matrix.double() / made.scales[:, groups]) + made.zeros[:, groups]
        return cls(codes.clamp(0, top).long(), made.scales, made.zeros, groups)

    @property
    def weights(self) -> Tensor:
        """Float64 [rows, columns]."""
        return (self.codes - self.zeros[:, self.groups]).double() * self.scales[:, self.groups]


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [rows, columns] in int32 words along the rows: that of the column ``order[i]`` is in the i-th bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    words = torch.zeros(len(codes), padded.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order or range(per_word)):
        words |= (padded[:, column::per_word] & ((1 << bits) - 1)) << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def to_packed(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    shuffled: bool = False,
    packs_zeros: bool = True,
) -> Quantize:
    """``pack-quantized`` of compressed-tensors; a group of 0 is one for each row."""

    def quantize(matrix: Tensor) -> tuple[Tensors, Tensor]:
        coded = IntegerCodes.of(matrix, bits, group, symmetric=symmetric, dtype=dtype, shuffled=shuffled)
        stored = {
            "weight_packed": pack(coded.codes, bits),
            "weight_scale": coded.scales.to(dtype),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            plain = (coded.zeros - (1 << (bits - 1))).to(torch.int8)
            stored["weight_zero_point"] = pack(coded.zeros.t(), bits).t() if packs_zeros else plain
        if shuffled:
            stored["weight_g_idx"] = coded.groups.to(torch.int32)
        return stored, coded.weights

    return quantize


def to_int8(group: int, *, symmetric: bool = True, dtype: torch.dtype = torch.float32) -> Quantize:
    """``int-quantized`` of compressed-tensors; a group of 0 is one for each row."""

    def quantize(matrix: Tensor) -> tuple[Tensors, Tensor]:
        coded = IntegerCodes.of(matrix, 8, group, symmetric=symmetric, dtype=dtype)
        stored = {"weight": (coded.codes - 128).to(torch.int8), "weight_scale": coded.scales.to(dtype)}
        if not symmetric:
            stored["weight_zero_point"] = (coded.zeros - 128).to(torch.int8)
        return stored, coded.weights

    return quantize


def to_gptq(
    bits: int, group: int, *, symmetric: bool = True, version: int = 1, shuffled: bool = False, has_index: bool = True
) -> Quantize:
    """GPTQ; a group of 0 is one for each row. Version 1 stores zero points less one, modulo their range."""

    def quantize(matrix: Tensor) -> tuple[Tensors, Tensor]:
        coded = IntegerCodes.of(matrix, bits, group, symmetric=symmetric, dtype=torch.float16, shuffled=shuffled)
        stored = {
            "qweight": pack(coded.codes, bits).t(),
            "qzeros": pack((coded.zeros - (1 if version == 1 else 0)).t(), bits),
            "scales": coded.scales.t().half(),
        }
        if has_index:
            stored["g_idx"] = coded.groups.to(torch.int32)
        return stored, coded.weights

    return quantize


def to_awq(group: int) -> Quantize:
    """AWQ's ``gemm``; a group of 0 is one for each row."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantize(matrix: Tensor) -> tuple[Tensors, Tensor]:
        coded = IntegerCodes.of(matrix, 4, group, symmetric=False, dtype=torch.float16)
        stored = {
            "qweight": pack(coded.codes.t(), 4, order),
            "qzeros": pack(coded.zeros.t(), 4, order),
            "scales": coded.scales.t().half(),
        }
        return stored, coded.weights

    return quantize


def compressed_config(form: str, bits: int, group: int, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors for integers; a group of 0 is one for each row."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    scheme = {"num_bits": bits, "type": "int", "symmetric": True} | strategy | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def gptq_config(bits: int, group: int, **settings: Any) -> dict[str, Any]:
    """A ``quantization_config`` of GPTQ; a group of -1 is one for each row."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False} | settings


def assert_same_weights(pair: QuantizedPair, dtype: str = "float32") -> None:
    """The quantized checkpoint has the weights of the plain one."""
    ours, expected = (load_model(path, dtype=dtype).destinations() for path in (pair.quantized, pair.plain))
    assert ours.keys() == expected.keys()
    assert pair.weights
    assert {name for name, weights in expected.items() if not torch.equal(ours[name], weights)} == set()


def edit_tensors(pair: QuantizedPair, change: dict[str, Any]) -> None:
    """Replace tensors of the quantized checkpoint; None removes one."""
    tensors = load_file(pair.quantized / "model.safetensors") | change
    save_file({name: each for name, each in tensors.items() if each is not None}, pair.quantized / "model.safetensors")

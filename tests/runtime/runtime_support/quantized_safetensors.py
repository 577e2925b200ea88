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

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]
"""From a matrix [out, in] to its stored tensors, by the ends of their names, and the float64 weights that they mean."""
_PLAIN = re.compile(r"(embed_tokens|lm_head|norm|mlp\.gate|router|block_sparse_moe\.gate)\.weight$")


@dataclass(frozen=True)
class QuantizedPair:
    """A quantized checkpoint, and a plain one with the weights that it means."""

    quantized: Path
    plain: Path
    weights: Tensors
    """The weights of the quantized matrices, float64, by name."""


def quantize_folder(plain: Path, quantize: Quantize, settings: dict[str, Any], *, files: int = 1) -> QuantizedPair:
    """Quantize all linear layers of the checkpoint in ``plain``, whose weights become those of the quantized one.

    Args:
        plain: Holds a ``model.safetensors``, which is rewritten.
        quantize: For each matrix.
        settings: Becomes the ``quantization_config``.
        files: Number of files of the result. Tensors of one matrix may be in several.
    """
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    weights: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight") or _PLAIN.search(name):
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

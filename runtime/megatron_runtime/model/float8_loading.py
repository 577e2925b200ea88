"""Chooses the matrices of a checkpoint that stay in fp8 on a GPU, and replaces a decoder's modules for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.float8_source import Float8Source
from megatron_runtime.model.formats.weight_source import WeightSource, float8_group
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.placements import Placement
from megatron_runtime.model.positions import Positions
from megatron_runtime.model.quantized.float8_linear import Float8Linear
from megatron_runtime.model.quantized.float8_placement import Float8Placement
from megatron_runtime.model.quantized_loading import log_kept, matrices_of, replace_modules
from megatron_runtime.parallel.ranks import Ranks


def float8_decoder(
    config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device | str, ranks: Ranks | None
) -> Decoder:
    """An unfilled decoder for ``source``, without memory for expanded matrices that stay in fp8."""
    decoder = Decoder(config, dtype=dtype, device="meta", ranks=ranks)
    _replace_matrices(decoder, source, decoder.placements())
    _allocate(decoder, device)
    decoder.positions = Positions(config, dtype, device)
    return decoder


def keep_float8(decoder: Decoder, source: WeightSource) -> dict[str, Placement | Float8Placement]:
    """Replace the matrices of an unfilled decoder that ``source`` stores in fp8; returns all destinations."""
    _replace_matrices(decoder, source, decoder.placements())
    placements = decoder.placements()
    destinations: dict[str, Placement | Float8Placement] = dict(placements)
    kept: Counter[str] = Counter()
    for module, names in matrices_of(placements).items():
        if not isinstance(module, Float8Linear):
            continue
        start = 0
        for name in names:
            part = placements[name]
            (height, width), rows = part.view.shape, part.stored
            if part.dim == 1:
                (columns,), rows = part.stored, (range(height),)
            else:
                columns = range(width)
            destinations[name] = Float8Placement(module, start, rows, columns)
            start += height
            kept[source.tensors[name].kind] += 1
    log_kept(kept, source, destinations)
    return destinations


def _replace_matrices(decoder: Decoder, source: WeightSource, placements: Mapping[str, Placement]) -> None:
    """Nothing is left to do for those that are replaced."""
    if not isinstance(source, Float8Source):
        return
    replaced: dict[nn.Module, nn.Module] = {}
    for module, names in matrices_of(placements).items():
        if isinstance(module, Linear) and (group := _group(source, [(name, placements[name]) for name in names])):
            coding = source.tensors[names[0]].float8
            assert coding is not None
            with module.weight.device:
                shape, kind = module.weight.shape, getattr(torch, coding.type_name)
                replaced[module] = Float8Linear(shape[0], shape[1], group, kind, module.bias, decoder.dtype)
    replace_modules(decoder, replaced)


def _group(source: WeightSource, parts: Sequence[tuple[str, Placement]]) -> int | None:
    """As in `float8_group`, of the tensors of a matrix."""
    (name, first), tensors = parts[0], source.tensors
    width = tensors[name].shape[1]
    columns = first.stored[0] if first.dim == 1 else range(width)
    return float8_group([tensors[each].float8 for each, _ in parts], columns, width)


def _allocate(decoder: Decoder, device: torch.device | str) -> None:
    """Give the parameters memory on a device. One that several modules have remains one."""
    made: dict[int, nn.Parameter] = {}
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
            setattr(module, name, made[id(parameter)])

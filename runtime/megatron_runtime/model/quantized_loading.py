"""Chooses the matrices of a checkpoint that stay quantized, and replaces a decoder's modules for them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping

from torch import nn

from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.embedding import Embedding
from megatron_runtime.model.formats.coded_rows import BLOCK
from megatron_runtime.model.formats.weight_source import CodedSource, WeightSource
from megatron_runtime.model.head import Head
from megatron_runtime.model.kernels import quantized_products
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.placements import Placement
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.model.quantized.placement import CodedPlacement

_logger = logging.getLogger(__name__)


def keep_quantized(decoder: Decoder, source: WeightSource) -> dict[str, Placement | CodedPlacement]:
    """Replace the matrices of an unfilled decoder that ``source`` stores quantized; returns all destinations.

    A matrix whose tensors don't all have a `Coding` is filled as in any other checkpoint.
    """
    placements = decoder.placements()
    destinations: dict[str, Placement | CodedPlacement] = dict(placements)
    if not isinstance(source, CodedSource):
        return destinations
    replaced: dict[nn.Module, QuantizedLinear] = {}
    kept: Counter[str] = Counter()
    for module, names in matrices_of(placements).items():
        coded = _coded(source, {name: placements[name] for name in names})
        if len(coded) < len(names):
            continue
        destinations |= coded
        kept.update(source.tensors[name].kind for name in names)
        matrices = list(dict.fromkeys(placement.matrix for placement in coded.values()))
        if isinstance(module, Linear):
            replaced[module] = QuantizedLinear(matrices, module.bias, decoder.dtype)
        else:
            _keep_table(decoder, module, matrices[0])
    replace_modules(decoder, replaced)
    for coding in {each.matrix.coding for each in destinations.values() if isinstance(each, CodedPlacement)}:
        quantized_products.prepare(coding, decoder.dtype)
    log_kept(kept, source, destinations)
    return destinations


def matrices_of(placements: Mapping[str, Placement]) -> dict[nn.Module, list[str]]:
    """The names of the tensors of each module's matrix, in the order of its rows."""
    found: dict[nn.Module, list[str]] = {}
    for name, placement in placements.items():
        if placement.matrix_of is not None:
            found.setdefault(placement.matrix_of, []).append(name)
    return found


def _coded(source: WeightSource, placements: Mapping[str, Placement]) -> dict[str, CodedPlacement]:
    """The quantized destinations of the tensors of one matrix; without those that can't stay quantized.

    Consecutive tensors with the same coding share a `QuantizedMatrix`, because each has a cost of its own in a product.
    """
    found: dict[str, CodedPlacement] = {}
    runs = itertools.groupby(placements, lambda name: source.tensors[name].coding)
    for coding, names in ((coding, list(run)) for coding, run in runs):
        parts = [placements[name] for name in names]
        if coding is None or not all(map(_is_between_blocks, parts)):
            continue
        heights, width = [part.view.shape[0] for part in parts], parts[0].view.shape[1]
        matrix = QuantizedMatrix(sum(heights), width, coding)
        for name, part, end in zip(names, parts, itertools.accumulate(heights), strict=True):
            rows, columns = (part.stored, range(width)) if part.dim == 0 else ((range(heights[0]),), part.stored[0])
            start = end - part.view.shape[0]
            found[name] = CodedPlacement(matrix, start, rows, slice(columns.start, columns.stop))
    return found


def _is_between_blocks(placement: Placement) -> bool:
    """Whether ranks divide no block of columns."""
    return placement.dim == 0 or all(part.start % BLOCK == len(part) % BLOCK == 0 for part in placement.stored)


def _keep_table(decoder: Decoder, module: nn.Module, matrix: QuantizedMatrix) -> None:
    """A head that is tied to the embedding on this rank gets the same matrix."""
    assert isinstance(module, Embedding | Head)
    module.keep_quantized(matrix)
    if isinstance(module, Embedding) and decoder.head is not None and decoder.config.tie_word_embeddings:
        decoder.head.keep_quantized(matrix)


def replace_modules(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the places of those in ``module`` that are keys."""
    for name, child in module.named_children():
        if child in replaced:
            setattr(module, name, replaced[child])
        else:
            replace_modules(child, replaced)


def log_kept(kept: Counter[str], source: WeightSource, destinations: Mapping[str, object]) -> None:
    """The kinds of the matrices that stay quantized, and of those that don't."""
    expanded = Counter(
        source.tensors[name].kind
        for name, placement in destinations.items()
        if isinstance(placement, Placement) and placement.matrix_of is not None
    )
    _logger.info("matrices that stay quantized: %s; expanded: %s", _counts(kept), _counts(expanded))


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"

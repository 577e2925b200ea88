"""Random tensors of every quantization of the gguf package, which can quantize to few of them."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
from gguf import GGMLQuantizationType

FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of a random tensor, the same for the same arguments: uint8 [..., bytes of a row]."""
    random = np.random.default_rng(shape)
    if kind in FLOATS:
        return gguf.quants.quantize(random.normal(0.0, 0.05, shape).astype(np.float32), kind)
    pool = _pool(kind)
    per_row = shape[-1] // gguf.GGML_QUANT_SIZES[kind][0]
    chosen = random.integers(0, len(pool), (*shape[:-1], per_row))
    return pool[chosen].reshape(*shape[:-1], -1)


@cache
def _pool(kind: GGMLQuantizationType) -> np.ndarray:
    """Random blocks whose weights have a usual size, [n, bytes of a block]."""
    found, random = [], np.random.default_rng(0)
    while sum(map(len, found)) < 64:
        raw = random.integers(0, 256, (4096, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.quants.dequantize(raw, kind)).max(axis=1)
        found.append(raw[(largest > 0.02) & (largest < 0.2)])
    return np.concatenate(found)

"""The numbers of requests for which decode passes are captured as CUDA graphs."""

from __future__ import annotations

from megatron_runtime.config import CudaGraphSizingDistribution, InferenceConfig
from megatron_runtime.model.products import FIXED_ROWS

_SMALL = (1, 2, 4)
_LINEAR_STEPS = ((8, 256), (16, 1 << 30))
"""Steps, and up to where they are used."""
_ROUNDING = 8


def graph_sizes(config: InferenceConfig, max_requests: int) -> list[int]:
    """The sizes, ascending; a pass runs on the graph of the smallest one that its requests fit.

    The largest is the most requests of a pass, or ``cuda_graph_max_tokens`` if that is less. ``exponential`` halves it
    down to 1; of these, the ``num_cuda_graphs`` largest are used. ``linear`` has ``num_cuda_graphs`` equal steps, which
    are rounded up to multiples of 8. With ``num_cuda_graphs=-1``, ``exponential`` has all of its sizes, and ``linear``
    1, 2, 4, then steps of 8 up to 256, then of 16. These rules are those of Megatron Core. With ``batch_invariant``
    the sizes are rounded up to multiples of the rows of a product, so that nothing has to be padded.

    Args:
        config: The settings; None or 0 graphs: no sizes.
        max_requests: Most requests of a pass.
    """
    count, largest = config.num_cuda_graphs, min(max_requests, config.cuda_graph_max_tokens)
    if not count:
        return []
    if config.cuda_graph_sizing_distribution is CudaGraphSizingDistribution.LINEAR:
        sizes = _linear(largest, count)
    else:
        sizes = _halved(largest)
    sizes = sizes if count < 0 else sizes[-count:]
    if config.batch_invariant:
        return sorted({-(-size // FIXED_ROWS) * FIXED_ROWS for size in sizes})
    return sizes


def _halved(largest: int) -> list[int]:
    return [largest >> bits for bits in reversed(range(largest.bit_length()))]


def _linear(largest: int, count: int) -> list[int]:
    if count > 0:
        step = -(-largest // (count * _ROUNDING)) * _ROUNDING
        return [*range(step, largest, step), largest]
    sizes = [*_SMALL]
    for step, end in _LINEAR_STEPS:
        sizes += range(max(sizes[-1] // step + 1, 1) * step, min(end, largest) + 1, step)
    return sorted({size for size in sizes if size < largest} | {largest})

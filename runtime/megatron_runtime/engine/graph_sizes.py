"""The sizes of the passes that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence as Slices
from typing import NamedTuple

from megatron_runtime.config import CudaGraphSizingDistribution, InferenceConfig
from megatron_runtime.model.products import FIXED_ROWS

_SMALL = (1, 2, 4)
_LINEAR_STEPS = ((8, 256), (16, 1 << 30))
"""Steps, and up to where they are used."""
_ROUNDING = 8
_TOKEN_STEP = 64
"""Up to about 200 tokens, a pass takes as long as reading the weights, so smaller steps would save nothing."""
_TOKEN_SHARE = 4
"""The steps of larger sizes are this part of a power of two, so that at most a fifth of a pass is padding."""
_FEW_REQUESTS = 8
"""Graphs with prompts are for the most requests, and for this part of them: each request of padding costs a little in
attention and as much as another one in the head."""


class GraphSize(NamedTuple):
    """The size of a graph: of tokens and requests, with padding. A draft counts as a request of one token."""

    tokens: int
    requests: int

    @property
    def has_prompts(self) -> bool:
        """Whether requests may have more than one token, or tokens that are not sampled after."""
        return self.tokens > self.requests


def graph_sizes(config: InferenceConfig, max_requests: int, max_tokens: int) -> list[GraphSize]:
    """The sizes of all graphs, ascending; empty for none.

    Args:
        config: The settings.
        max_requests: Most requests of a pass.
        max_tokens: Most tokens of a pass.
    """
    requests = decode_sizes(config, most_rows(config, max_requests, max_tokens))
    return sorted([*(GraphSize(size, size) for size in requests), *prompt_sizes(config, requests, max_tokens)])


def most_rows(config: InferenceConfig, max_requests: int, max_tokens: int) -> int:
    """Most tokens that a pass samples: after each request and each draft, as far as the pass has room for drafts."""
    return min(max_requests * (1 + config.num_speculative_tokens), max_tokens)


def decode_sizes(config: InferenceConfig, max_rows: int) -> list[int]:
    """The numbers of requests of graphs without prompts, ascending; a pass runs on the smallest one that it fits.

    The largest is ``max_rows``, or ``cuda_graph_max_tokens`` if that is less. ``exponential`` halves it down to 1; of
    these, the ``num_cuda_graphs`` largest are used. ``linear`` has ``num_cuda_graphs`` equal steps, which are rounded
    up to multiples of 8. With ``num_cuda_graphs=-1``, ``exponential`` has all of its sizes, and ``linear`` 1, 2, 4,
    then steps of 8 up to 256, then of 16. These rules are those of Megatron Core. With ``batch_invariant`` the sizes
    are rounded up to multiples of the rows of a product, so that nothing has to be padded.

    Args:
        config: The settings; None or 0 graphs: no sizes.
        max_rows: Most requests of a pass with their drafts, as from `most_rows`.
    """
    count, largest = config.num_cuda_graphs, min(max_rows, config.cuda_graph_max_tokens)
    if not count:
        return []
    if config.cuda_graph_sizing_distribution is CudaGraphSizingDistribution.LINEAR:
        sizes = _linear(largest, count)
    else:
        sizes = _halved(largest)
    sizes = sizes if count < 0 else sizes[-count:]
    if config.batch_invariant:
        return sorted({_rounded(size, FIXED_ROWS) for size in sizes})
    return sizes


def prompt_sizes(config: InferenceConfig, requests: Slices[int], max_tokens: int) -> list[GraphSize]:
    """The sizes of graphs with prompts, ascending.

    Tokens go in steps of 64, and above 512 in steps of a quarter of a power of two, up to ``cuda_graph_max_tokens``, or
    with ``cuda_graph_all_prefills`` to the most tokens of a pass; ``num_cuda_graphs`` limits their number, in equal
    steps. Each is captured for few and for the most requests, which are fewer than its tokens.

    Args:
        config: The settings.
        requests: The numbers of requests of the graphs without prompts, ascending.
        max_tokens: Most tokens of a pass.
    """
    limit = max_tokens if config.cuda_graph_all_prefills else min(config.cuda_graph_max_tokens, max_tokens)
    wanted = config.use_cuda_graphs_for_non_decode_steps and config.cuda_graph_mixed_prefill_count > 0
    if not requests or not wanted or limit < 2:
        return []
    few = next(size for size in requests if size * _FEW_REQUESTS >= requests[-1])
    multiple = FIXED_ROWS if config.batch_invariant else 1
    tokens = _token_sizes(_rounded(limit, multiple), _rounded(_TOKEN_STEP, multiple), config.num_cuda_graphs or 0)
    return sorted({GraphSize(size, min(most, size - 1)) for size in tokens for most in (few, requests[-1])})


def _token_sizes(limit: int, step: int, count: int) -> list[int]:
    if count > 0:
        step = _rounded(-(-limit // count), step)
        return [*range(step, limit, step), limit]
    sizes, size = [], step
    while size < limit:
        sizes.append(size)
        size += max(step, (1 << size.bit_length() - 1) // _TOKEN_SHARE)
    return [*sizes, limit]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _halved(largest: int) -> list[int]:
    return [largest >> bits for bits in reversed(range(largest.bit_length()))]


def _linear(largest: int, count: int) -> list[int]:
    if count > 0:
        step = _rounded(-(-largest // count), _ROUNDING)
        return [*range(step, largest, step), largest]
    sizes = [*_SMALL]
    for step, end in _LINEAR_STEPS:
        sizes += range(max(sizes[-1] // step + 1, 1) * step, min(end, largest) + 1, step)
    return sorted({size for size in sizes if size < largest} | {largest})

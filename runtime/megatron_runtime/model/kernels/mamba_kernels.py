"""Compiled kernels of Mamba-2: one token after the other, so that bits do not depend on chunks or batches.

The arrays are float32. Sums have the order of the source text on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, prange, void

from megatron_runtime.model.kernels.compiled import compile_kernel, exponential, logistic
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.recurrent_kernels import FLOATS, INTEGERS, convolution_kernel, softplus


def prepare() -> None:
    """Compile the kernels now, so that the first request does not wait for it."""
    convolution_kernel()
    scan_kernel()
    group_norm_kernel()


@kernel_factory
def scan_kernel() -> Kernel:
    """The recurrence of the selective state space model.

    Arguments: queries and keys [T, key heads, key dim]; values [T, value heads, value dim]; steps [T, value heads],
    before softplus; rates, biases and skips [value heads]; the shortest and the longest step; states [slots, value
    heads, key dim, value dim]; slots, starts and is_new of the requests; outputs as values; bounds of the threads'
    value heads.
    """

    def scan(
        queries: Any, keys: Any, values: Any, steps: Any, rates: Any, biases: Any, skips: Any, shortest: Any,
        longest: Any, states: Any, slots: Any, starts: Any, is_new: Any, outputs: Any, bounds: Any,
    ) -> None:  # fmt: skip
        key_dim, value_dim = states.shape[2], states.shape[3]
        together = values.shape[1] // keys.shape[1]
        for share in prange(len(bounds) - 1):
            update = np.empty(value_dim, np.float32)
            for head in range(bounds[share], bounds[share + 1]):
                for request in range(len(slots)):
                    state = states[slots[request], head]
                    if is_new[request]:
                        state[:] = np.float32(0)
                    for row in range(starts[request], starts[request + 1]):
                        # In this order, a NaN remains.
                        step = min(max(softplus(steps[row, head] + biases[head]), shortest), longest)
                        decay = exponential(-rates[head] * step)
                        for channel in range(value_dim):
                            update[channel] = step * values[row, head, channel]
                            outputs[row, head, channel] = np.float32(0)
                        for place in range(key_dim):
                            key, query = keys[row, head // together, place], queries[row, head // together, place]
                            for channel in range(value_dim):
                                state[place, channel] = decay * state[place, channel] + key * update[channel]
                                outputs[row, head, channel] += state[place, channel] * query
                        for channel in range(value_dim):
                            outputs[row, head, channel] += skips[head] * values[row, head, channel]

    views, each, requests = float32[:, :, :], FLOATS[1], (INTEGERS,) * 3
    limits = (float32, float32)
    signature = void(
        views, views, views, float32[:, :], each, each, each, *limits, FLOATS[4], *requests, FLOATS[3], INTEGERS
    )
    return compile_kernel(scan, signature, fast=False)


@kernel_factory
def group_norm_kernel() -> Kernel:
    """``x = x * silu(gate)``, then ``weight * x / sqrt(mean(x^2) + eps)`` over each group of channels, in place of x.

    Arguments: rows and gates [N, groups, size]; weight [groups, size]; eps; bounds of the threads' rows.
    """

    def normalize(rows: Any, gates: Any, weight: Any, eps: Any, bounds: Any) -> None:
        size = rows.shape[2]
        for share in prange(len(bounds) - 1):
            for row in range(bounds[share], bounds[share + 1]):
                for group in range(rows.shape[1]):
                    total = np.float32(0)
                    for channel in range(size):
                        gate = gates[row, group, channel]
                        value = rows[row, group, channel] * (gate * logistic(gate))
                        rows[row, group, channel] = value
                        total += value * value
                    inverse = np.float32(1 / np.sqrt(np.float64(total) / size + eps))
                    for channel in range(size):
                        rows[row, group, channel] = weight[group, channel] * (rows[row, group, channel] * inverse)

    signature = void(FLOATS[3], float32[:, :, :], FLOATS[2], float32, INTEGERS)
    return compile_kernel(normalize, signature, fast=False)

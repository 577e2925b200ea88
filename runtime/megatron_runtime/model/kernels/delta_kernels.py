"""Compiled kernels of the gated delta rule: one token after the other, so that bits do not depend on chunks or batches.

The arrays are float32. Sums have the order of the source text on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit, prange, void

from megatron_runtime.model.kernels.compiled import compile_kernel, exponential, logistic
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.recurrent_kernels import FLOATS, INTEGERS, convolution_kernel, softplus

EPS = 1e-6
"""Added to the squares of queries and keys, whose norm is made one."""


@njit(inline="always")
def _inverse_norm(vector: Any, factor: Any) -> Any:
    """One over the length of ``vector``, and over the square root of ``factor``."""
    squares = np.float32(0)
    for place in range(len(vector)):
        squares += vector[place] * vector[place]
    return np.float32(1 / np.sqrt((np.float64(squares) + EPS) * factor))


def prepare() -> None:
    """Compile the kernels now, so that the first request does not wait for it."""
    convolution_kernel()
    delta_kernel()
    gated_norm_kernel()


@kernel_factory
def delta_kernel() -> Kernel:
    """The gated delta rule.

    Arguments: queries and keys [T, key heads, key dim]; values [T, value heads, value dim]; steps and strengths [T,
    value heads], before softplus and sigmoid; rates and biases [value heads]; states [slots, value heads, key dim,
    value dim]; slots, starts and is_new of the requests; outputs as values; bounds of the threads' value heads.
    """

    def apply(
        queries: Any, keys: Any, values: Any, steps: Any, strengths: Any, rates: Any, biases: Any, states: Any,
        slots: Any, starts: Any, is_new: Any, outputs: Any, bounds: Any,
    ) -> None:  # fmt: skip
        key_dim, value_dim = states.shape[2], states.shape[3]
        together = values.shape[1] // keys.shape[1]
        for share in prange(len(bounds) - 1):
            query, key = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
            update = np.empty(value_dim, np.float32)
            for head in range(bounds[share], bounds[share + 1]):
                for request in range(len(slots)):
                    state = states[slots[request], head]
                    if is_new[request]:
                        state[:] = np.float32(0)
                    for row in range(starts[request], starts[request + 1]):
                        query[:] = queries[row, head // together]
                        key[:] = keys[row, head // together]
                        of_query, of_key = _inverse_norm(query, key_dim), _inverse_norm(key, 1)
                        decay = exponential(-rates[head] * softplus(steps[row, head] + biases[head]))
                        update[:] = np.float32(0)
                        for place in range(key_dim):
                            query[place] *= of_query
                            key[place] *= of_key
                            for channel in range(value_dim):
                                state[place, channel] *= decay
                                update[channel] += state[place, channel] * key[place]
                        for channel in range(value_dim):
                            update[channel] = (values[row, head, channel] - update[channel]) * logistic(
                                strengths[row, head]
                            )
                            outputs[row, head, channel] = np.float32(0)
                        for place in range(key_dim):
                            for channel in range(value_dim):
                                state[place, channel] += key[place] * update[channel]
                                outputs[row, head, channel] += state[place, channel] * query[place]

    heads, each = FLOATS[3], FLOATS[1]
    requests = (INTEGERS,) * 3
    views, flat = float32[:, :, :], float32[:, :]
    signature = void(views, views, views, flat, flat, each, each, FLOATS[4], *requests, heads, INTEGERS)
    return compile_kernel(apply, signature, fast=False)


@kernel_factory
def gated_norm_kernel() -> Kernel:
    """``weight * x / sqrt(mean(x^2) + eps) * silu(gate)`` over the last dimension, in place of x.

    Arguments: rows and gates [N, size]; weight [size]; eps; bounds of the threads' rows.
    """

    def normalize(rows: Any, gates: Any, weight: Any, eps: Any, bounds: Any) -> None:
        size = rows.shape[1]
        for share in prange(len(bounds) - 1):
            for row in range(bounds[share], bounds[share + 1]):
                total = np.float32(0)
                for channel in range(size):
                    total += rows[row, channel] * rows[row, channel]
                inverse = np.float32(1 / np.sqrt(np.float64(total) / size + eps))
                for channel in range(size):
                    gate = gates[row, channel]
                    rows[row, channel] = weight[channel] * (rows[row, channel] * inverse) * (gate * logistic(gate))

    rows = FLOATS[2]
    return compile_kernel(normalize, void(rows, float32[:, :], FLOATS[1], float32, INTEGERS), fast=False)

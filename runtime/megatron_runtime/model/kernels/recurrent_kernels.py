"""What the compiled kernels of all recurrent layers have in common, and the kernel of their convolution.

The arrays are float32. Sums have the order of the source text on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, prange, void

from megatron_runtime.model.kernels.compiled import compile_kernel, exponential, logistic
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel

FLOATS = {1: float32[::1], 2: float32[:, ::1], 3: float32[:, :, ::1], 4: float32[:, :, :, ::1]}
"""Contiguous arrays by their number of dimensions."""
INTEGERS = int64[::1]


@njit(inline="always")
def softplus(x: Any) -> Any:
    """In compiled code: ``log(1 + e^x)`` of a float32."""
    return x if x > np.float32(20) else np.log1p(exponential(x))


@njit(inline="always")
def _input(own: Any, state: Any, place: Any, channel: Any) -> Any:
    """The input at this place among those of the pass, or before them: among the last ones before the pass."""
    return own[place, channel] if place >= 0 else state[place + len(state), channel]


@kernel_factory
def convolution_kernel() -> Kernel:
    """``silu`` of the causal convolution of each channel.

    Arguments: inputs [T, channels]; weight [taps, channels]; bias [channels]; states [slots, taps - 1, channels], the
    last inputs of each sequence; slots, starts and is_new of the requests; outputs [T, channels]; bounds of the
    threads' channels.
    """

    def convolve(
        inputs: Any, weight: Any, bias: Any, states: Any, slots: Any, starts: Any, is_new: Any, outputs: Any,
        bounds: Any,
    ) -> None:  # fmt: skip
        before = weight.shape[0] - 1
        for share in prange(len(bounds) - 1):
            for request in range(len(slots)):
                first, end = starts[request], starts[request + 1]
                state = states[slots[request], :, bounds[share] : bounds[share + 1]]
                if is_new[request]:
                    state[:] = np.float32(0)
                own = inputs[first:end, bounds[share] : bounds[share + 1]]
                for row in range(first, end):
                    for channel in range(own.shape[1]):
                        total = bias[bounds[share] + channel]
                        for tap in range(before + 1):
                            value = _input(own, state, row - first + tap - before, channel)
                            total += weight[tap, bounds[share] + channel] * value
                        outputs[row, bounds[share] + channel] = total * logistic(total)
                for place in range(before):
                    for channel in range(own.shape[1]):
                        state[place, channel] = _input(own, state, end - first + place - before, channel)

    rows, states = FLOATS[2], FLOATS[3]
    signature = void(rows, rows, FLOATS[1], states, INTEGERS, INTEGERS, INTEGERS, rows, INTEGERS)
    return compile_kernel(convolve, signature, fast=False)

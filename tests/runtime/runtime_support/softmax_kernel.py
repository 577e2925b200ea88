"""A kernel that compiles in two seconds, and whose last digits depend on how often LLVM has optimized it.

`compile_kernel` compiles it as the kernels of the runtime. Those of attention, for which it stands, take six times as
long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, prange, void

from megatron_runtime.model.kernels.compiled import compile_kernel, exponential
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel

WIDTH = 64


@kernel_factory
def softmax_kernel() -> Kernel:
    """Attention of queries to keys, which are the values too: [rows, WIDTH], [columns, WIDTH], to [rows, WIDTH]."""

    def attend(queries: Any, keys: Any, seen: Any, shares: Any) -> None:
        for share in prange(len(shares) - 1):
            scores = np.empty(len(keys), np.float32)
            for row in range(shares[share], shares[share + 1]):
                top, whole = np.float32(-1e30), np.float32(0)
                for column in range(len(keys)):
                    score = np.float32(0)
                    for channel in range(WIDTH):
                        score += queries[row, channel] * keys[column, channel]
                    scores[column] = score
                    top = max(top, score)
                for column in range(len(keys)):
                    scores[column] = exponential(scores[column] - top)
                    whole += scores[column]
                for channel in range(WIDTH):
                    seen[row, channel] = np.float32(0)
                for column in range(len(keys)):
                    for channel in range(WIDTH):
                        seen[row, channel] += scores[column] / whole * keys[column, channel]

    matrix = float32[:, ::1]
    return compile_kernel(attend, void(matrix, matrix, matrix, int64[::1]))

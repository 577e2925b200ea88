"""The batch sizes of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.graph_sizes import graph_sizes

LINEAR = {"cuda_graph_sizing_distribution": "linear"}
CASES: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, 256, []),
    ({"num_cuda_graphs": 0}, 256, []),
    ({"num_cuda_graphs": -1}, 256, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
    ({"num_cuda_graphs": 16}, 256, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
    ({"num_cuda_graphs": 3}, 256, [64, 128, 256]),
    ({"num_cuda_graphs": -1}, 100, [1, 3, 6, 12, 25, 50, 100]),
    ({"num_cuda_graphs": -1}, 1, [1]),
    ({"num_cuda_graphs": -1, "cuda_graph_max_tokens": 8}, 256, [1, 2, 4, 8]),
    ({"num_cuda_graphs": -1} | LINEAR, 40, [1, 2, 4, 8, 16, 24, 32, 40]),
    ({"num_cuda_graphs": -1} | LINEAR, 300, [1, 2, 4, *range(8, 257, 8), 272, 288, 300]),
    ({"num_cuda_graphs": -1} | LINEAR, 3, [1, 2, 3]),
    ({"num_cuda_graphs": 4} | LINEAR, 256, [64, 128, 192, 256]),
    ({"num_cuda_graphs": 16} | LINEAR, 100, [*range(8, 100, 8), 100]),
    ({"num_cuda_graphs": 3} | LINEAR, 1000, [176, 352, 512]),
]


@pytest.mark.parametrize(("settings", "max_requests", "sizes"), CASES, ids=str)
def test_the_sizes_follow_the_settings(settings: dict[str, Any], max_requests: int, sizes: list[int]) -> None:
    assert graph_sizes(InferenceConfig(**settings), max_requests) == sizes

"""The sizes of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.graph_sizes import GraphSize, decode_sizes, graph_sizes, prompt_sizes

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
    assert decode_sizes(InferenceConfig(**settings), max_requests) == sizes


@pytest.mark.parametrize(
    ("drafts", "max_tokens", "largest", "sizes"),
    [(2, 100, 512, [1, 2, 4, 9]), (2, 8, 512, [1, 2, 4, 8]), (2, 100, 6, [1, 3, 6]), (0, 100, 512, [1, 3])],
)
def test_drafts_have_room_in_the_largest_graph(drafts: int, max_tokens: int, largest: int, sizes: list[int]) -> None:
    """Of 3 requests, as far as a pass and a graph have room."""
    config = InferenceConfig(num_cuda_graphs=-1, num_speculative_tokens=drafts, cuda_graph_max_tokens=largest)
    found = graph_sizes(config, 3, max_tokens)
    assert [size.tokens for size in found if not size.has_prompts] == sizes
    assert max(size.requests for size in found) == sizes[-1]


FEW, ALL = [*range(64, 513, 64)], [64, 128, 256]
PROMPTS: list[tuple[dict[str, Any], list[int], int, list[int]]] = [
    ({}, [], 4096, []),
    ({"num_cuda_graphs": -1}, ALL, 4096, FEW),
    ({"num_cuda_graphs": -1}, ALL, 100, [64, 100]),
    ({"num_cuda_graphs": -1}, [1], 1, []),
    ({"num_cuda_graphs": -1, "cuda_graph_max_tokens": 1100}, ALL, 4096, [*FEW, 640, 768, 896, 1024, 1100]),
    ({"num_cuda_graphs": -1, "cuda_graph_all_prefills": True}, ALL, 1536, [*FEW, 640, 768, 896, 1024, 1280, 1536]),
    ({"num_cuda_graphs": 3}, ALL, 4096, [192, 384, 512]),
    ({"num_cuda_graphs": 1}, ALL, 4096, [512]),
    ({"num_cuda_graphs": -1, "use_cuda_graphs_for_non_decode_steps": False}, ALL, 4096, []),
    ({"num_cuda_graphs": -1, "cuda_graph_mixed_prefill_count": 0}, ALL, 4096, []),
]


@pytest.mark.parametrize(("settings", "requests", "max_tokens", "tokens"), PROMPTS, ids=str)
def test_the_sizes_with_prompts_follow_the_settings(
    settings: dict[str, Any], requests: list[int], max_tokens: int, tokens: list[int]
) -> None:
    sizes = prompt_sizes(InferenceConfig(**settings), requests, max_tokens)
    assert sorted({size.tokens for size in sizes}) == tokens
    assert all(size.has_prompts for size in sizes)


def test_sizes_with_prompts_are_for_few_and_for_the_most_requests() -> None:
    sizes = graph_sizes(InferenceConfig(num_cuda_graphs=2, cuda_graph_max_tokens=256), 256, 4096)
    assert sizes == [(128, 127), (128, 128), (256, 128), (256, 255), (256, 256)]
    assert [size.has_prompts for size in sizes] == [True, False, True, True, False]
    every = graph_sizes(InferenceConfig(num_cuda_graphs=-1), 256, 4096)
    assert {size.requests for size in every if size.tokens == 512} == {32, 256}
    assert max(every) == GraphSize(512, 256)

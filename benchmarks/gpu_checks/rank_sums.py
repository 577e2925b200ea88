"""Sums over tensor parallel ranks, by symmetric memory where that is possible, and by NCCL: bits and times."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_checks.results import Result, Sizes
from megatron_runtime.parallel.join import join_replica_group
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.multiple_ranks import MultipleRanks
from megatron_runtime.parallel.symmetric_memory import BUFFER_BYTES, SETTING

KINDS = {"chosen": "auto", "by NCCL": "nccl"}
"""By the words of a row: values of the setting."""
_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = (1, 8, 64, 256, 1024)
_TOY_ROWS = (1, 3)
_TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Relative to the sum of the magnitudes of the parts."""
_REPLAYS = 20


def join(position: RankPosition, port: int, device: str, kind: str) -> MultipleRanks:
    """The ranks of a replica group, which add up in this way. The CPU has only one."""
    with patch.dict(os.environ, {SETTING: KINDS[kind]}):
        ranks = join_replica_group(position, host="127.0.0.1", port=port, key="benchmark", device_type=device)
    assert isinstance(ranks, MultipleRanks)
    return ranks


@torch.inference_mode()
def find_sums(sizes: Sizes, ranks: MultipleRanks, device: str) -> dict[str, Any]:
    """What this rank finds: for each type and number of rows the bits, what is wrong with them, and the seconds."""
    said: dict[str, Any] = {"in order": ranks.adds_up_in_order, "sums": {}}
    width = int(sizes.model["hidden_size"])
    for dtype in _DTYPES:
        for rows in _ROWS if sizes.has_gpu else _TOY_ROWS:
            generator = torch.Generator().manual_seed(rows)
            count = ranks.position.sizes.tensor
            parts = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(count)]
            said["sums"][dtype, rows] = _sum(sizes, ranks, parts, device)
    return said


def _sum(sizes: Sizes, ranks: MultipleRanks, parts: list[Tensor], device: str) -> dict[str, Any]:
    mine, row = parts[ranks.position.rank].to(device), slice(len(parts[0]) // 2, len(parts[0]) // 2 + 1)
    found = ranks.sum(mine.clone()).cpu()
    alone = ranks.sum(mine[row].clone()).cpu()
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    error = (found.double() - sum(part.double() for part in parts)).abs().max()
    scale = sum(part.double().abs() for part in parts)
    assert isinstance(scale, Tensor)
    wrong = [] if bool(error <= _TOLERANCES[found.dtype] * scale.max()) else [f"an error of {float(error):.2g}"]
    again = mine.clone()
    seconds, captured = _seconds(sizes, lambda: ranks.sum(again.copy_(mine)), ranks)
    if ranks.adds_up_in_order and found.numel() * found.element_size() <= BUFFER_BYTES:
        wrong += [] if torch.equal(found, in_order) else ["not in the order of the ranks"]
        wrong += [] if torch.equal(alone, found[row]) else ["a row alone has other bits"]
        wrong += [] if captured is None or torch.equal(captured.cpu(), found) else ["other bits in a CUDA graph"]
    bits = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
    return {"bits": bits, "wrong": wrong, "seconds": seconds}


def _seconds(sizes: Sizes, work: Callable[[], Tensor], ranks: MultipleRanks) -> tuple[float, Tensor | None]:
    """Of a copy and a sum: on a GPU as a CUDA graph, replayed several times in a row; and its last result."""
    if not sizes.has_gpu:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started, None
    from megatron_runtime.gpu.graphs import GraphRecorder

    results: list[Tensor] = []
    graph = GraphRecorder(torch.device("cuda", torch.cuda.current_device())).record(lambda: results.append(work()))
    graph.replay()
    torch.cuda.synchronize()
    ranks.barrier("begin")
    started = time.perf_counter()
    for _ in range(_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _REPLAYS, results[-1]


def rows_of(name: str, found: list[dict[str, dict[str, Any]]]) -> Iterator[Result]:
    """What all ranks have found of each kind, as rows of the table."""
    for kind in found[0]:
        said = [each[kind] for each in found]
        how = "in the order of the ranks" if said[0]["in order"] else "in an order of NCCL's"
        for dtype, rows in said[0]["sums"]:
            mine = [each["sums"][dtype, rows] for each in said]
            wrong = sorted({words for each in mine for words in each["wrong"]})
            wrong += [] if len({each["bits"] for each in mine}) == 1 else ["other bits on other ranks"]
            took = max(each["seconds"] for each in mine)
            words = f"{', '.join(wrong) or 'equal on all ranks, ' + how}; {took * 1e6:.4g} us"
            title = f"{name}: sum {kind}, {str(dtype).removeprefix('torch.')}, {rows} rows"
            yield Result(title, words, "no other bits", is_wrong=bool(wrong))

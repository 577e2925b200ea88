"""Tensor parallel ranks, each with a pretended device in a process of its own, and real exchanges between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_support.device_guard import load_device_guard
from gpu_support.pretended import PretendedDevice, PretendedTensor, Work, pretended_device
from gpu_support.quick_interpreter import quick_interpreter
from gpu_support.small_engine import generate, random_decoder, small_engine
from runtime_support.byte_backend import END
from runtime_support.device_collectives import GlooCollectives, use_collectives
from runtime_support.group_scenarios import join
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.gpu import launch
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.refit import update_weights
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams

EVEN_VOCABULARY = END + 1 + (END + 1) % 2
"""Two ranks have equally many tokens of it; otherwise there is one more launch on some."""


class PretendedCollectives(GlooCollectives):
    """Each operation is a launch, which graphs capture and repeat; gloo exchanges what it would."""

    def _reduce_by_nccl(self, part: Tensor, group: Any) -> None:
        assert isinstance(part, PretendedTensor)
        content, reduce = part.content, super()._reduce_by_nccl
        assert content.is_contiguous(), "NCCL refuses others"
        part.device_.changed(lambda: exchange(part.device_, reduce, content, group))

    def _all_gather(self, gathered: Tensor, part: Tensor) -> None:
        assert isinstance(gathered, PretendedTensor)
        assert isinstance(part, PretendedTensor)
        whole, content, gather = gathered.content, part.content, super()._all_gather
        gathered.device_.changed(lambda: exchange(gathered.device_, gather, whole, content))


def exchange(device: PretendedDevice, operation: Any, *args: Any) -> None:
    """What a kernel does that needs other ranks; without them it never ends."""
    if device.stuck is not None:
        return
    try:
        with _disable_current_modes():
            operation(*args)
    except RuntimeError as error:
        device.stuck = error


@contextmanager
def pretended_rank(
    rank: int,
    sizes: ParallelSizes,
    port: int,
    guard: Path,
    collectives: type[GlooCollectives] = PretendedCollectives,
    use_device: Callable[[PretendedDevice], None] = lambda _: None,
) -> Iterator[tuple[PretendedDevice, Ranks]]:
    """A rank with a device, as a GPU of compute capability 9.0; ``use_device`` gets it before the ranks join.

    ``guard`` is the folder of the device's part in C++.
    """
    load_device_guard(guard)
    setattr(launch, "_capability", lambda _: 90)  # noqa: B010
    use_collectives(collectives)
    with np.errstate(over="ignore"), quick_interpreter(), pretended_device() as device:
        use_device(device)
        with _disable_current_modes():
            ranks = join(sizes, rank, port)
        yield device, ranks
    ranks.close()


def part_of(model: Decoder, ranks: Ranks) -> Decoder:
    """This rank's part of a model, on its device."""
    here = Decoder(model.config, dtype=model.dtype, ranks=ranks)
    update_weights(here, model.destinations())
    there = Decoder(model.config, dtype=model.dtype, device="cuda", ranks=ranks)
    there.copy_from(here)
    return there


def captured_engine(model: Decoder, ranks: Ranks, **config: Any) -> DynamicInferenceEngine:
    """With graphs for 1 and 3 requests."""
    return small_engine(part_of(model, ranks), **({"num_cuda_graphs": -1, "max_requests": 3} | config))


def answer(
    rank: int, sizes: ParallelSizes, port: int, guard: Path, cases: list[dict[str, Any]], lengths: tuple[int, ...]
) -> list[dict[str, Any]]:
    """For each case the tokens and what the device did; `test_decode_graphs` has such cases."""
    found = []
    with pretended_rank(rank, sizes, port, guard) as (device, ranks):
        for case in cases:
            model = random_decoder(**({"num_layers": 1} | case.get("model", {})))
            engine = captured_engine(model, ranks, **case.get("config", {}))
            device.work = Work()
            tokens = generate(engine, case.get("params", {}), case.get("between"), lengths)
            engine.check_integrity()
            found.append({"tokens": tokens, "replays": device.work.replays, "copies": dict(+device.work.copies)})
    return found


def count(rank: int, sizes: ParallelSizes, port: int, guard: Path, params: dict[str, Any]) -> dict[str, Any]:
    """The launches of a pass and its sampling with one layer and with two, and what a step asks of the device."""
    said: dict[str, Any] = {"launches of a graph": []}
    with pretended_rank(rank, sizes, port, guard) as (device, ranks):
        for layers in (1, 2):
            device.graphs = []
            engine = captured_engine(random_decoder(num_layers=layers, vocab_size=EVEN_VOCABULARY), ranks)
            forward, sampling = device.graphs[:2]
            said["launches of a graph"].append(len(forward.launches) + len(sampling.launches))
        for index in range(2):
            engine.add_request(index, [65 + index] * 5, SamplingParams(num_tokens_to_generate=20, seed=index, **params))
        for _ in range(2):
            engine.step_modern()
        device.work = Work()
        result = engine.step_modern()
        work = device.work
        said["graph"] = result["cuda_graph_request_count"]
        said["step"] = (work.replays, work.launches, work.pinned_copies, dict(+work.copies), sum(work.waits.values()))
        engine.reset()
        # A rank that closes its connections is lost to one whose last pass has not ended.
        with _disable_current_modes():
            ranks.barrier("the last pass")
    return said


def add_up_on_device(rank: int, sizes: ParallelSizes, port: int, guard: Path) -> list[float]:
    """A captured sum is repeated by each replay, with the values of that time."""
    with pretended_rank(rank, sizes, port, guard) as (_, ranks), torch.inference_mode():
        part, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            total.copy_(ranks.sum(part * (rank + 1)))
        sums = []
        for factor in (1.0, 10.0):
            part.fill_(factor)
            graph.replay()
            sums.append(total.tolist()[0])
    return sums

"""The ranks' functions in the tests of symmetric memory, in a module that their processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.pretended_ranks import EVEN_VOCABULARY, captured_engine, pretended_rank
from gpu_support.small_engine import generate, random_decoder
from gpu_support.symmetric import FakeSymmetricMemory, PretendedSymmetricMemory, SymmetricCollectives, machine_with_gpus
from runtime_support.device_collectives import GlooCollectives, use_collectives
from runtime_support.group_scenarios import join
from torch import Tensor

from megatron_runtime.errors import LostRankError
from megatron_runtime.gpu import peers
from megatron_runtime.parallel import symmetric_memory
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.parallel.symmetric_memory import BUFFER_BYTES, ONE_SHOT_BYTES
from megatron_runtime.sampling_params import SamplingParams


class HostCollectives(GlooCollectives):
    """On tensors of the host, with sums over symmetric memory; those by NCCL are gloo's, and counted."""

    by_nccl = 0

    @classmethod
    def open_sums(cls, position: Any, groups: Any, share: Any) -> Any:
        """As on a machine with GPUs."""
        return SymmetricCollectives.open_sums(position, groups, share)

    def has_symmetric_memory(self) -> list[bool]:
        """By process group: of dense layers, and of experts if that is another one."""
        return [group in self._symmetric for group in dict.fromkeys((self._groups.tensor, self._groups.expert))]

    def _reduce_by_nccl(self, part: Tensor, group: Any) -> None:
        self.by_nccl += 1
        super()._reduce_by_nccl(part, group)


def add_up(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """Sums of all sizes and types: whether each has the bits of the sum in the order of the ranks, and which kernels it
    took; and whether others are left to NCCL.
    """
    fake = FakeSymmetricMemory()
    with _host_rank(rank, sizes, port, fake) as (ranks, collectives):
        most, all_rows = ONE_SHOT_BYTES[sizes.tensor] // 2048, BUFFER_BYTES // 2048
        said: dict[str, Any] = {}
        for name, cases in {
            "small": [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 8), (torch.bfloat16, most)],
            "large": [(torch.bfloat16, rows) for rows in (most + 1, all_rows) if most < all_rows],
        }.items():
            fake.calls = []
            right = [_adds_up(ranks, dtype, rows) for dtype, rows in cases]
            said[name] = all(right), {kind for kind, num_bytes in fake.calls if num_bytes > 4096}
        assert collectives.by_nccl == 0
        fake.calls = []
        half, odd = torch.ones(4, 8, dtype=torch.float16), torch.ones(3, 3, dtype=torch.bfloat16)
        for part in (half, odd, torch.ones(0, 8), torch.ones(BUFFER_BYTES // 4 + 8)):
            assert ranks.memory_for_part(part.shape, part.dtype) is None
            assert ranks.sum(part).eq(sizes.tensor).all()
        said["by NCCL"] = collectives.by_nccl, len(fake.calls)
        for part in (torch.ones(41)[1:], torch.ones(8, 5).t()):  # as the kernels can't write it, on one rank alone
            given = part if rank == 1 else torch.ones(part.shape)
            assert ranks.sum(given) is given
            assert given.eq(sizes.tensor).all()
        said["on one rank"] = len(fake.calls)
    return said


def _adds_up(ranks: Ranks, dtype: torch.dtype, rows: int, width: int = 1024) -> bool:
    """Also a row alone."""
    generator = torch.Generator().manual_seed(rows)
    parts = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(ranks.position.sizes.tensor)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    mine, row = parts[ranks.position.rank], slice(rows // 2, rows // 2 + 1)
    alone, whole = ranks.sum(mine[row].clone()), ranks.sum(mine.clone())
    memory = ranks.memory_for_part(mine.shape, dtype)
    assert memory is not None
    there = ranks.sum(memory.copy_(mine))
    return torch.equal(whole, expected) and torch.equal(alone, expected[row]) and torch.equal(there, expected)


def choose(rank: int, sizes: ParallelSizes, port: int, change: str, changed: int) -> tuple[list[bool], bool]:
    """For each process group whether it has symmetric memory, if one rank lacks something; and whether it adds up."""
    fake = FakeSymmetricMemory()
    with (
        _lacking(change if rank == changed else "", fake),
        _host_rank(rank, sizes, port, fake) as (ranks, collectives),
    ):
        found = collectives.has_symmetric_memory()
        assert collectives.can_abort != any(found)
        return found, bool(ranks.sum_experts(torch.ones(2, 8)).eq(sizes.ranks_per_stage).all())


@contextmanager
def _host_rank(
    rank: int, sizes: ParallelSizes, port: int, fake: FakeSymmetricMemory
) -> Iterator[tuple[Ranks, HostCollectives]]:
    use_collectives(HostCollectives)
    with machine_with_gpus(rank, fake):
        ranks = join(sizes, rank, port)
    collectives = ranks._collectives  # type: ignore[attr-defined]
    assert isinstance(collectives, HostCollectives)
    yield ranks, collectives
    ranks.close()


@contextmanager
def _lacking(change: str, fake: FakeSymmetricMemory) -> Iterator[None]:
    """What one rank lacks."""
    if change == "rendezvous":
        fake.failure = RuntimeError("no descriptors\nwere passed")
    changes: dict[str, Any] = {
        "setting": patch.dict(os.environ, {symmetric_memory.SETTING: "nccl"}),
        "machine": patch.object(symmetric_memory, "_machine", lambda: "another one"),
        "access": patch.object(peers, "peer_obstacle", lambda *_: "no access"),
    }
    with changes.get(change, nullcontext()):
        yield


@contextmanager
def _symmetric_rank(
    rank: int, sizes: ParallelSizes, port: int, guard: Path
) -> Iterator[tuple[PretendedDevice, Ranks, PretendedSymmetricMemory]]:
    fake = PretendedSymmetricMemory()
    joined = pretended_rank(rank, sizes, port, guard, SymmetricCollectives, fake.use_device)
    with machine_with_gpus(rank, fake), joined as (device, ranks):
        yield device, ranks, fake


def answer(
    rank: int, sizes: ParallelSizes, port: int, guard: Path, params: dict[str, Any], lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Tokens by graphs with such sums, and what a step asks of the device."""
    with _symmetric_rank(rank, sizes, port, guard) as (device, ranks, fake):
        engine = captured_engine(random_decoder(num_layers=1), ranks)
        tokens = generate(engine, params, None, lengths)
        said = {"tokens": tokens, "kinds": sorted({name for name, _ in fake.calls}), "launches of a graph": []}
        for layers in (1, 2):
            device.graphs = []
            captured_engine(random_decoder(num_layers=layers, vocab_size=EVEN_VOCABULARY), ranks)
            said["launches of a graph"].append(sum(len(graph.launches) for graph in device.graphs[:2]))
        engine.add_request(9, [65] * 5, SamplingParams(temperature=0.0, num_tokens_to_generate=20))
        for _ in range(2):
            engine.step_modern()
        device.work = Work()
        engine.step_modern()
        work = device.work
        said["step"] = (work.replays, work.launches, work.pinned_copies, dict(+work.copies), sum(work.waits.values()))
        engine.reset()
    return said


CASES: dict[str, dict[str, Any]] = {
    "decode passes": {"params": {"temperature": 0.0}},
    "eager passes": {"params": {"temperature": 0.0}, "config": {"num_cuda_graphs": 0}},
    "edits, log probs": {
        "params": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "return_log_probs": True}
    },
}


def lose(rank: int, sizes: ParallelSizes, port: int, guard: Path, case: str, victim: int) -> dict[str, Any]:
    """A rank is killed between passes; the kernels of the others never end from then on."""
    chosen = CASES[case]
    with _symmetric_rank(rank, sizes, port, guard) as (device, ranks, _):
        engine = captured_engine(random_decoder(num_layers=1), ranks, max_requests=1, **chosen.get("config", {}))
        params = SamplingParams(ignore_eos=True, num_tokens_to_generate=200, **chosen["params"])
        engine.add_request(0, [65] * 5, params)
        for _ in range(4):
            engine.step_modern()
        ranks.barrier("all have begun")
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        said = _until_lost(engine.step_modern)
        said |= {"again": _until_lost(engine.step_modern)["missing"], "stuck": device.stuck is not None}
    return said


def _until_lost(step: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    while True:
        try:
            step()
        except LostRankError as error:
            return {"missing": list(error.missing), "message": str(error), "seconds": time.monotonic() - started}

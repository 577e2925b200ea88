"""The ranks' functions in the tests of waits for a device, in a module that their processes can import."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from runtime_support.device_collectives import (
    EndlessCollectives,
    GlooCollectives,
    StuckCollectives,
    use_collectives,
)
from runtime_support.group_scenarios import join

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel import device_watch
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks


def lose(rank: int, sizes: ParallelSizes, port: int, victim: int, is_killed: bool) -> dict[str, Any]:
    """All ranks wait for a kernel that needs the victim, which is killed or late; what they notice, and when."""
    use_collectives()
    ranks = join(sizes, rank, port, timeout=30.0 if is_killed else 2.0)
    ranks.barrier("begin")
    if rank == victim:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8.0)
        return {"message": "was away"}
    started = time.monotonic()
    try:
        ranks.supervise(_collectives(ranks).wait_for_kernel)
    except LostRankError as error:
        ranks.close()
        return {"message": str(error), "missing": list(error.missing), "seconds": time.monotonic() - started}
    return {"message": "nothing"}


def lose_while_stuck(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """The abort does not end either: the owner of the process learns of the lost rank."""
    setattr(device_watch, "_LAST_GRACE", 0.5)  # noqa: B010
    ranks = _join_and_lose_others(StuckCollectives, rank, sizes, port)
    told: queue.Queue[LostRankError] = queue.Queue()
    ranks.watch(told.put)
    waiting = _collectives(ranks).wait_for_kernel
    threading.Thread(target=lambda: ranks.supervise(waiting), daemon=True).start()
    error = told.get(timeout=20.0)
    return {"message": str(error), "missing": list(error.missing)}


class EndlessEvent:
    """Stands for torch.cuda.Event, of work that never ends."""

    def query(self) -> bool:
        """Whether it has ended."""
        return False


def lose_while_endless(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """The work of the device never ends, whatever is aborted: the host goes on; and again, when more is to be done."""
    ranks = _join_and_lose_others(EndlessCollectives, rank, sizes, port)
    said: dict[str, Any] = {"missing": [], "worked": False}
    wait = partial(ranks.await_device, cast("Any", EndlessEvent()))
    for act in (wait, wait, partial(ranks.supervise, lambda: said.update(worked=True))):
        try:
            act()
        except LostRankError as error:
            said["missing"].append(list(error.missing))
    ranks.close()
    return said


def fail_for_lost_memory(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """The device fails at the memory of a lost rank, before this rank has noticed the loss."""
    ranks = _join_and_lose_others(EndlessCollectives, rank, sizes, port)

    def work() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    try:
        ranks.supervise(work)
    except LostRankError as error:
        ranks.close()
        return {"missing": list(error.missing), "cause": type(error.__cause__).__name__}
    return {}


def wait_without_an_end(rank: int, sizes: ParallelSizes, port: int, folder: Path) -> None:
    """Of a library's caller, that no event and no abort ends."""
    setattr(device_watch, "_LAST_GRACE", 0.5)  # noqa: B010
    ranks = _join_and_lose_others(StuckCollectives, rank, sizes, port)
    (folder / "waits").touch()
    ranks.supervise(_collectives(ranks).wait_for_kernel)
    (folder / "goes on").touch()


def leave_in_order(rank: int, sizes: ParallelSizes, port: int) -> float:
    """Other ranks leave; the first one has work left that needs none of them, within supervision and without."""
    setattr(device_watch, "_GRACE", 0.5)  # noqa: B010
    use_collectives()
    ranks = join(sizes, rank, port)
    summed = float(ranks.supervise(lambda: ranks.sum(torch.ones(1))))
    if rank == 0:
        time.sleep(2.0)
        ranks.supervise(lambda: None)
        time.sleep(1.0)
    ranks.close()
    return summed


def fail_at_work(rank: int, sizes: ParallelSizes, port: int) -> str:
    """An error of the work itself, and nested work."""
    use_collectives()
    ranks = join(sizes, rank, port)

    def work() -> None:
        ranks.barrier("within")
        raise ValueError("wrong")

    try:
        ranks.supervise(lambda: ranks.supervise(work))
    except ValueError as error:
        ranks.barrier("after")
        ranks.close()
        return str(error)
    return "nothing"


def gather_columns(rank: int, sizes: ParallelSizes, port: int, as_on_gpus: bool) -> list[bool]:
    """Whether this rank gets all columns of random matrices, or nothing where it has no logits, and keeps its part."""
    if as_on_gpus:
        use_collectives()
    ranks = join(sizes, rank, port)
    generator, equal = torch.Generator().manual_seed(5), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for widths in ([4, 4, 4], [5, 4, 4], [2, 1, 1]):
            for rows in (0, 1, 7):
                whole = torch.randn(rows, sum(widths), generator=generator).to(dtype)
                own = whole.split(widths, dim=1)[rank].clone()
                given = own.clone()
                found = ranks.gather(given, widths)
                is_right = found is not None and found.dtype is torch.float32 and torch.equal(found, whole.float())
                equal.append(is_right if ranks.has_logits else found is None)
                assert torch.equal(given, own)
    ranks.close()
    return equal


def _join_and_lose_others(kind: type[GlooCollectives], rank: int, sizes: ParallelSizes, port: int) -> Ranks:
    """The ranks of the first one; the others are killed once all have joined."""
    use_collectives(kind)
    ranks = join(sizes, rank, port)
    ranks.barrier("begin")
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return ranks


def _collectives(ranks: Ranks) -> GlooCollectives:
    found = ranks._collectives  # type: ignore[attr-defined]
    assert isinstance(found, GlooCollectives)
    return found

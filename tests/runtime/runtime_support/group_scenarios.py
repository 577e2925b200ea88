"""The ranks' functions in the tests of replica groups, in a module that their processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_runtime.errors import LockStepError, LostRankError
from megatron_runtime.parallel.join import join_replica_group, replica_group_of_world
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks


def join(sizes: ParallelSizes, rank: int, port: int, **settings: Any) -> Ranks:
    """A replica group on this machine."""
    return join_replica_group(
        sizes.position_in_replica_group(rank), host="127.0.0.1", port=port, key="secret", **settings
    )


def speak(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """Every operation between ranks, once."""
    ranks = join(sizes, rank, port)
    position = ranks.position
    said: dict[str, Any] = {"name": str(position)}
    for name, inbox in (("inbox", b"short"), ("large inbox", bytes(range(256)) * 100), ("empty inbox", b"")):
        said[name] = ranks.share_inbox(inbox if position.is_first else None)
    outcomes = [f"outcome {number}".encode() * 500**number for number in range(3)]
    pending = [
        ranks.share_outcome(outcome if position.samples else None, checksum=2**64 - 1 - number)
        for number, outcome in enumerate(outcomes)
    ]
    said["outcomes"] = [outcome.wait() == expected for outcome, expected in zip(pending, outcomes, strict=True)]
    ranks.barrier("suspend")
    said["least"] = ranks.least(100 - rank)
    said["complaint"] = ranks.first_error(f"rank {rank} has something to say" if rank else None)
    said["no complaint"] = ranks.first_error(None)
    torch.manual_seed(position.tensor_rank)
    part = torch.randn(7, 5)
    said["sum"] = ranks.sum(part.clone())
    said["sum in bfloat16"] = ranks.sum(part.bfloat16())
    said["large sum"] = ranks.sum(torch.full((1000, 1000), float(rank))).unique().tolist()
    said["sum over experts"] = ranks.sum_experts(torch.full((2, 3), float(rank))).unique().tolist()
    said["row alone"] = ranks.sum(part[3:4].clone())
    width = 3 + (position.tensor_rank == 0)
    columns = ranks.gather(torch.full((2, width), float(rank)), [4] + [3] * (sizes.tensor - 1))
    said["gathered"] = columns
    said["received"] = _pass_on(ranks)
    ranks.close()
    return said


def _pass_on(ranks: Ranks) -> list[float]:
    """As many batches as stages are sent before the first one arrives."""
    seen = []
    for batch in range(2 * ranks.position.sizes.pipeline):
        hidden = torch.full((batch + 1, 1000), float(batch))
        if not ranks.position.is_first_stage:
            hidden = ranks.receive((batch + 1, 1000), torch.float32)
        if not ranks.position.is_last_stage:
            ranks.send(hidden + 100)
        seen.append(float(hidden.mean()))
    return seen


def speak_in_world(rank: int, sizes: ParallelSizes, port: int) -> dict[str, Any]:
    """The same in one world over all replica groups."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sizes.world_size)
    ranks = replica_group_of_world(sizes)
    position = ranks.position
    mine = f"inbox of replica group {position.replica_group}".encode()
    said = {
        "name": str(position),
        "inbox": ranks.share_inbox(mine if position.is_first else None),
        "least": ranks.least(rank),
        "sum": float(ranks.sum(torch.full((1, 1), float(rank)))),
        "received": _pass_on(ranks),
    }
    ranks.close()
    dist.barrier()
    dist.destroy_process_group()
    return said


def fail(rank: int, sizes: ParallelSizes, port: int, trouble: str, victim: int) -> dict[str, Any]:
    """The victim is killed, stops or leaves the lock step; what the others detect, and after which time."""
    ranks = join(sizes, rank, port, timeout=20.0 if trouble == "death" else 2.0)
    ranks.barrier("begin")
    start = time.monotonic()
    try:
        if rank == victim:
            return _TROUBLES[trouble](ranks)
        _work(ranks)
    except LostRankError as error:
        return {"message": str(error), "missing": list(error.missing), "seconds": time.monotonic() - start}
    except LockStepError as error:
        return {"message": str(error)}
    return {"message": "nothing"}


def _work(ranks: Ranks) -> None:
    for _ in range(1000):
        ranks.share_inbox(b"work" if ranks.position.is_first else None)
        first = ranks.position.is_first_stage
        hidden = ranks.sum(torch.zeros(4, 8) if first else ranks.receive((4, 8), torch.float32))
        if not ranks.position.is_last_stage:
            ranks.send(hidden)
        ranks.share_outcome(b"tokens" if ranks.position.samples else None, checksum=1).wait()


def _die(_: Ranks) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _stall(_: Ranks) -> dict[str, Any]:
    time.sleep(6.0)
    return {"message": "was away"}


def _stray(ranks: Ranks) -> dict[str, Any]:
    ranks.share_inbox(b"work" if ranks.position.is_first else None)
    hidden = ranks.sum(torch.zeros(4, 8) if ranks.position.is_first_stage else ranks.receive((4, 8), torch.float32))
    if not ranks.position.is_last_stage:
        ranks.send(hidden)
    try:
        ranks.share_outcome(b"tokens" if ranks.position.samples else None, checksum=2).wait()
    except LockStepError as error:
        return {"message": str(error)}
    return {"message": "nothing"}


_TROUBLES: dict[str, Callable[[Ranks], dict[str, Any]]] = {"death": _die, "stall": _stall, "stray": _stray}


def miss_barrier(rank: int, sizes: ParallelSizes, port: int) -> str:
    """Rank 1 does not reach the barrier."""
    ranks = join(sizes, rank, port)
    ranks.barrier("begin")
    if rank == 1:
        time.sleep(4.0)
        return "was away"
    try:
        ranks.barrier("resume", timeout=1.0)
    except LostRankError as error:
        return str(error)
    return "nothing"


def miss_rendezvous(rank: int, sizes: ParallelSizes, port: int, absent: int) -> str:
    """One rank does not join."""
    if rank == absent:
        return "never came"
    try:
        join(sizes, rank, port, rendezvous_timeout=2.0)
    except LostRankError as error:
        return str(error)
    return "nothing"


def use_processor(rank: int, sizes: ParallelSizes, port: int) -> float:
    """Seconds of processor time that a rank uses in two seconds without work."""
    ranks = join(sizes, rank, port)
    ranks.barrier("begin")
    before = time.process_time()
    if rank == 0:
        time.sleep(2.0)
    ranks.share_inbox(b"" if rank == 0 else None)
    used = time.process_time() - before
    ranks.close()
    return used

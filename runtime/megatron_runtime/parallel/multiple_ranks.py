"""A replica group of several ranks, over torch.distributed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_runtime.errors import LockStepError, LostRankError
from megatron_runtime.parallel.channel import Channel, OutcomeMessage
from megatron_runtime.parallel.collectives import make_collectives
from megatron_runtime.parallel.device_watch import DeviceWatch
from megatron_runtime.parallel.exchange import Exchange
from megatron_runtime.parallel.failure_detector import COMPUTING, FailureDetector
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.link_watch import LinkWatch
from megatron_runtime.parallel.process_groups import ProcessGroups

T = TypeVar("T")

_CONTRIBUTION = 512
"""Bytes that each rank contributes to a synchronization."""


class MultipleRanks:
    """The `Ranks` of a replica group with several ranks; created by `join_replica_group` or `replica_group_of_world`.

    Args:
        position: The place of this rank.
        groups: Its process groups.
        failure_detector: Finds lost ranks.
        address: Of this machine, as the other ranks reach it.
        device_type: ``cuda`` or ``cpu``.
        timeout: Seconds after which another rank is late.
    """

    def __init__(
        self,
        position: RankPosition,
        groups: ProcessGroups,
        failure_detector: FailureDetector,
        *,
        address: str,
        device_type: str,
        timeout: float,
    ) -> None:
        self.position = position
        self._groups = groups
        self._failure_detector = failure_detector
        self._device = torch.device("cpu")
        if device_type != "cpu":
            self._device = torch.device(device_type, torch.cuda.current_device())
        self._timeout = timeout
        self._others = position.others
        self._inbox = self._open_channel("inbox", 0, address)
        self._outcome = self._open_channel("outcome", position.sampler, address)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._synchronizations = 0
        self._closed = False
        self._watch: LinkWatch | None = None
        self._device_watch: DeviceWatch | None = None
        self._collectives = make_collectives(
            self._device, position, groups, partial(self._open_exchange, address), self._synchronize
        )
        if self._collectives.only_begins:
            self._device_watch = DeviceWatch(self._ends, failure_detector, self._abort, timeout)

    @property
    def has_logits(self) -> bool:
        """As in Ranks."""
        if self._collectives.gathers_to_all:
            return self.position.computes_logits
        return self.position.samples

    @property
    def samples_for_all(self) -> bool:
        """As in Ranks."""
        return not self._collectives.gathers_to_all

    @property
    def adds_up_in_order(self) -> bool:
        """As in Collectives: then the bits of a row's sum do not depend on other rows."""
        return self._collectives.adds_up_in_order

    def share_inbox(self, inbox: bytes | None) -> bytes:
        """As in Ranks."""
        if inbox is not None:
            assert self.position.is_first
            self._do("sharing the inbox", self._inbox.send, inbox)
            return inbox
        return self._do("waiting for the inbox", self._inbox.receive).body

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> SharedOutcome:
        """As in Ranks."""
        if outcome is not None:
            assert self.position.samples
            self._do("sharing an outcome", self._outcome.send, outcome, checksum)
            return SharedOutcome(lambda: outcome)
        return SharedOutcome(lambda: self._checked(self._do("waiting for an outcome", self._outcome.receive), checksum))

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """As in Ranks."""
        self._synchronize(f"barrier {name}", b"", timeout)

    def least(self, number: int) -> int:
        """As in Ranks."""
        return min(
            int(contribution) for contribution in self._synchronize("finding the least number", str(number).encode())
        )

    def first_error(self, error: str | None, timeout: float | None = None) -> str | None:
        """As in Ranks; a long error is truncated."""
        contributions = self._synchronize("sharing errors", (error or "").encode(), timeout)
        return next((contribution.decode(errors="ignore") for contribution in contributions if contribution), None)

    def sum(self, part: Tensor) -> Tensor:
        """As in Ranks."""
        if self.position.sizes.tensor == 1:
            return part
        return self._do("adding up a layer", self._collectives.sum, part)

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """As in Ranks."""
        return None if self.position.sizes.tensor == 1 else self._collectives.memory_for_part(shape, dtype)

    def sum_experts(self, part: Tensor) -> Tensor:
        """As in Ranks."""
        if self.position.sizes.ranks_per_stage == 1:
            return part
        return self._do("adding up experts", self._collectives.sum_experts, part)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """As in Ranks."""
        if self.position.sizes.tensor == 1:
            return part.float()
        return self._do("gathering logits", self._collectives.gather, part, widths)

    def send(self, hidden: Tensor) -> None:
        """As in Ranks."""
        self._do("sending activations", self._send, hidden.contiguous())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As in Ranks."""
        hidden = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        source = self._groups.first + self.position.rank - self.position.sizes.ranks_per_stage
        self._do("waiting for activations", dist.recv, hidden, source, self._groups.pipeline)
        return hidden

    def watch(self, act: Callable[[LostRankError], None]) -> None:
        """As in Ranks."""

        def tell(error: OSError) -> None:
            act(self._failure_detector.lost(f"{self._failure_detector.doing}, while a connection failed", error))

        self._watch = LinkWatch(self._ends, tell)
        if self._device_watch is not None:
            self._device_watch.act = act

    def supervise(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """As in Ranks."""
        return work() if self._device_watch is None else self._device_watch.supervise(work, timeout)

    def await_device(self, event: torch.cuda.Event | None = None) -> None:
        """As in Ranks."""
        if self._device_watch is None or self._collectives.can_abort:
            if event is not None:
                event.synchronize()
            return
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.supervise(partial(self._device_watch.wait_until, event.query))

    def close(self) -> None:
        """As in Ranks. Messages that were sent are delivered first, if they are read within the timeout."""
        if self._closed:
            return
        self._closed = True
        for watch in (self._watch, self._device_watch):
            if watch is not None:
                watch.close()
        try:
            while self._sent:
                self._sent.popleft()[0].wait()
        except RuntimeError:
            pass  # A lost rank needs no message.
        self._failure_detector.close()  # first, so that a rank with a closed connection gets no answer here
        for opened in (self._inbox, self._outcome, self._collectives):
            opened.close()
        if self._device_watch is not None and self._device_watch.has_aborted:
            return  # To destroy the groups could wait for the lost rank.
        if self._groups.owns_world:
            dist.destroy_process_group()
            return
        for group in (*self._groups.of_tensors, self._groups.control):
            dist.destroy_process_group(group)

    def _open_channel(self, name: str, source: int, address: str) -> Channel:
        store, timeout = self._failure_detector.store, self._timeout
        opening = partial(Channel, store, name, self.position, source=source, address=address, timeout=timeout)
        return self._do(f"opening the channel of the {name}", opening)

    def _open_exchange(self, address: str, name: str, peers: range) -> Exchange:
        store, timeout = self._failure_detector.store, self._timeout
        opening = partial(Exchange, store, name, self.position.rank, peers, address=address, timeout=timeout)
        return self._do(f"opening the connections of the {name}", opening)

    @property
    def _ends(self) -> list[socket.socket]:
        return [*self._inbox.ends, *self._outcome.ends]

    def _abort(self) -> None:
        """End what waits for other ranks: first the host, whose connections cannot take long to end."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._collectives.abort()

    def _do(self, doing: str, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that may wait for others. Errors of torch.distributed become errors with the lost ranks."""
        self._failure_detector.doing = doing
        try:
            return operation(*args)
        except (RuntimeError, OSError) as error:
            raise self._lost(doing, error) from error
        finally:
            self._failure_detector.doing = COMPUTING

    def _lost(self, doing: str, error: Exception, missing: list[int] | None = None) -> LostRankError:
        lost = self._failure_detector.lost(doing, error, missing)
        if self._device_watch is not None:
            self._device_watch.abort_for(lost)
        return lost

    def _checked(self, message: OutcomeMessage, checksum: int) -> bytes:
        if message.checksum != checksum:
            raise LockStepError(
                f"{self.position}: its schedule has the checksum {checksum:x}, that of rank {self.position.sampler} "
                f"{message.checksum:x}; they no longer do the same"
            )
        return message.body

    def _send(self, hidden: Tensor) -> None:
        target = self._groups.first + self.position.rank + self.position.sizes.ranks_per_stage
        work = dist.isend(hidden, target, self._groups.pipeline)
        assert work is not None
        self._sent.append((work, hidden))
        while len(self._sent) > self.position.sizes.pipeline:
            self._sent.popleft()[0].wait()

    def _synchronize(self, doing: str, contribution: bytes, timeout: float | None = None) -> list[bytes]:
        """The contributions of all ranks, by rank. Each rank first leaves a note in the store, so that missing ones can
        be named.
        """
        self._synchronizations += 1
        prefix, seconds = f"synchronization/{self._synchronizations}/", self._timeout if timeout is None else timeout
        self._failure_detector.doing = f"in {doing}"
        try:
            self._failure_detector.store.set(prefix + str(self.position.rank), "")
            contributions = self._exchange_contributions(
                doing.encode() + b"\0" + contribution, time.monotonic() + seconds
            )
        except RuntimeError as error:
            what = f"{doing}, for up to {seconds:g} s"
            raise self._lost(what, error, self._absent(prefix) or None) from error
        finally:
            self._failure_detector.doing = COMPUTING
        operations = [contribution.partition(b"\0") for contribution in contributions]
        for rank, (operation, _, _) in enumerate(operations):
            if operation != operations[self.position.rank][0]:
                raise LockStepError(f"{self.position} is at {doing}, but rank {rank} at {operation.decode()}")
        return [brought for _, _, brought in operations]

    def _exchange_contributions(self, contribution: bytes, deadline: float) -> list[bytes]:
        mine = torch.frombuffer(bytearray(contribution[:_CONTRIBUTION].ljust(_CONTRIBUTION, b"\0")), dtype=torch.uint8)
        contributions = {rank: torch.empty_like(mine) for rank in self._others}
        works = [
            work(tensor, self._groups.first + rank, self._groups.control)
            for work, tensors in ((dist.isend, dict.fromkeys(self._others, mine)), (dist.irecv, contributions))
            for rank, tensor in tensors.items()
        ]
        for work in works:
            assert work is not None
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        contributions[self.position.rank] = mine
        return [contributions[rank].numpy().tobytes().rstrip(b"\0") for rank in sorted(contributions)]

    def _absent(self, prefix: str) -> list[int]:
        """The ranks without a note."""
        try:
            return [rank for rank in self._others if not self._failure_detector.store.check([f"{prefix}{rank}"])]
        except RuntimeError:
            return []


class SharedOutcome:
    """The result of `MultipleRanks.share_outcome`."""

    def __init__(self, wait: Callable[[], bytes]) -> None:
        self.wait = wait

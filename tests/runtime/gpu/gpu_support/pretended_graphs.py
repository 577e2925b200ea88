"""CUDA graphs of the pretended device: a capture notes what the device would do, and a replay does it.

As on a GPU, nothing is computed during a capture, and waits and copies from the host are refused. Graphs of one pool
share their memory: each replay overwrites the intermediate results of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from gpu_support.pretended import PretendedDevice


class PretendedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    device: PretendedDevice

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.kernels: list[str] = []
        """Those launches that are kernels of this project."""
        self.used: list[Tensor] = []
        """The memory that its launches use."""
        self._memory: list[Tensor] = []
        self._pool: list[PretendedGraph] = []

    @contextmanager
    def capturing(self, pool: list[PretendedGraph]) -> Iterator[None]:
        """Note what this block asks of the device."""
        assert self.device.capture is None, "another capture is in progress"
        self._pool = pool
        pool.append(self)
        self.device.graphs.append(self)
        self.device.capture = self
        try:
            yield
        finally:
            self.device.capture = None

    def note(self, launch: Callable[[], None]) -> None:
        """Add a launch."""
        self.launches.append(launch)

    def note_kernel(self, name: str, launch: Callable[[], None]) -> None:
        """Add the launch of a kernel of this project."""
        self.kernels.append(name)
        self.note(launch)

    def computed(self, compute: Callable[[], Any]) -> Any:
        """Add the launch of an operator, and return its result, which has no values yet."""
        made = compute()
        targets = self.own(made)

        def launch() -> None:
            for target, value in zip(targets, tree_flatten(compute())[0], strict=True):
                target.copy_(value)

        self.note(launch)
        return made

    def own(self, made: Any) -> list[Tensor]:
        """Take new tensors as memory of the pool."""
        tensors = [each for each in tree_flatten(made)[0] if isinstance(each, Tensor)]
        self._memory += tensors
        overwrite(tensors)
        return tensors

    def replay(self) -> None:
        """Do all of it, by one launch of the host."""
        work = self.device.work
        work.launches += 1
        work.replays += 1
        work.kernels.update(self.kernels)
        for content in self.used:
            self.device.use(content)
        with _disable_current_modes():
            for each in self._pool:
                overwrite(each._memory)
            for launch in self.launches:
                launch()


def overwrite(tensors: list[Tensor]) -> None:
    """With values that no result may depend on."""
    for each in tensors:
        if each.dtype.is_floating_point:
            each.fill_(torch.nan)
        elif each.dtype is not torch.bool:
            each.fill_(torch.iinfo(each.dtype).max)


class PretendedEvent:
    """Stands for torch.cuda.Event: copies to the host end when it waits for them, or asks a second time whether they
    have ended, and all others at once.
    """

    device: PretendedDevice

    def __init__(self) -> None:
        self._before: list[Callable[[], Any]] = []
        self._was_asked = False

    def record(self) -> None:
        """The copies that are in progress come before it."""
        self._before = list(self.device.arriving)
        self._was_asked = False

    def query(self) -> bool:
        """Whether the work before it has ended."""
        if self.device.stuck is not None:
            return False
        if self._was_asked and self._is_pending:
            self.synchronize()
        self._was_asked = True
        return not self._is_pending

    @property
    def _is_pending(self) -> bool:
        return any(copy in self.device.arriving for copy in self._before)

    def synchronize(self) -> None:
        """Wait for it."""
        self.device.count_wait()
        for copy in self._before:
            if copy in self.device.arriving:
                self.device.arriving.remove(copy)
                copy()


class PretendedStream:
    """Stands for torch.cuda.Stream: there is one order of all work."""

    def __init__(self, device: torch.device | None = None) -> None:
        del device

    def wait_stream(self, other: PretendedStream) -> None:
        """All work before has ended."""
        del other


def graph_functions(device: PretendedDevice) -> dict[str, Any]:
    """What replaces the functions of torch.cuda."""
    graph_class = type("PretendedGraph", (PretendedGraph,), {"device": device})
    event_class = type("PretendedEvent", (PretendedEvent,), {"device": device})

    def graph(made: PretendedGraph, pool: list[PretendedGraph], stream: PretendedStream, **modes: str) -> Any:
        del stream, modes
        return made.capturing(pool)

    return {
        **{"CUDAGraph": graph_class, "graph": graph, "graph_pool_handle": list[PretendedGraph]},
        **{"Stream": PretendedStream, "current_stream": PretendedStream, "stream": lambda _: nullcontext()},
        "Event": event_class,
    }

"""The collectives of GPUs on the ranks of a test, which have none: over gloo, with what a device waits for."""

from __future__ import annotations

import threading
from typing import Any

from megatron_runtime.parallel import multiple_ranks
from megatron_runtime.parallel.gpu_collectives import GpuCollectives


class GlooCollectives(GpuCollectives):
    """Over gloo. Its operations wait, but a test can wait as for a kernel that needs a lost rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._aborted = threading.Event()

    @classmethod
    def open_sums(cls, position: Any, groups: Any, share: Any) -> Any:
        """Those over symmetric memory: none."""
        del position, groups, share

    def wait_for_kernel(self) -> None:
        """Returns, without an error, once the work of the device is aborted."""
        assert self._aborted.wait(60)

    def abort(self) -> None:
        """End the wait."""
        self._aborted.set()


class EndlessCollectives(GlooCollectives):
    """With work of the device that nothing ends."""

    can_abort = False


class StuckCollectives(GlooCollectives):
    """Whose abort does not end."""

    def abort(self) -> None:
        """Waits."""
        threading.Event().wait()


def use_collectives(kind: type[GpuCollectives] = GlooCollectives) -> None:
    """Let the ranks that this process joins from now on have collectives like those of GPUs."""

    def make(device: Any, position: Any, groups: Any, open_exchange: Any, share: Any) -> GpuCollectives:
        del open_exchange
        return kind(groups, device, kind.open_sums(position, groups, share))

    setattr(multiple_ranks, "make_collectives", make)  # noqa: B010

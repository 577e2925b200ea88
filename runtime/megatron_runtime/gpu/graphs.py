"""Captures work of a GPU into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphRecorder:
    """Captures graphs that share their memory: the results of one are lost once another one runs.

    What outlives a graph is therefore copied to tensors that were allocated before.

    Args:
        device: The GPU, which is the current one of this thread.
        await_device: Waits until it has done what it has begun, as `parallel.ranks.Ranks.await_device`; None: the
            beginning of a capture waits.
    """

    def __init__(self, device: torch.device, await_device: Callable[[], None] | None = None) -> None:
        self._await_device = await_device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Do the work once, and capture it.

        The first time, libraries allocate memory and Triton compiles, which a capture does not permit. Nothing of the
        work may wait for the device, and all tensors that it uses have to stay where they are.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        if self._await_device is not None:
            self._await_device()
        graph = torch.cuda.CUDAGraph()
        # Other threads, as those of NCCL, may ask the device for what a thread that captures may not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph

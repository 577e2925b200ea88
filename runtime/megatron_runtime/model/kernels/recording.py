"""Calls of kernels on a CPU, recorded in one pass and repeated in others.

With few rows, a pass needs more time to find the kernels and addresses of every layer again than for some of the
kernels, and the threads of the kernels fall asleep meanwhile. CUDA graphs avoid the same on a GPU.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

Kernel = Callable[..., None]

_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_READS = frozenset({"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "numpy", "size"})
"""Of a tensor's attributes; and its memory as an array."""
_VIEWS = frozenset(
    {"__getitem__", "chunk", "contiguous", "detach", "expand", "flatten", "reshape", "split", "squeeze", "t"}
    | {"transpose", "unbind", "unflatten", "unsqueeze", "view"}
)
"""Functions that return views, or copies for some arguments."""
_ALLOWED = _ALLOCATIONS | _READS | _VIEWS


class NotRecordableError(Exception):
    """A pass has an operation that is not recorded."""


class _Input(NamedTuple):
    """An argument that differs from pass to pass."""

    source: Hashable
    place: int
    """Among the inputs of the source."""


class _Call(NamedTuple):
    kernel: Kernel
    arguments: tuple[Any, ...]
    inputs: tuple[tuple[int, _Input], ...]
    """Places among the arguments, and what they get."""


class LayerMemory:
    """Memory of the layers of recordings that are never active or repeated at the same time.

    A layer gets its input from the layer before, so that two sets of memory are enough for all layers.

    Args:
        most_rows: The maximum of the rows of these recordings.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self._sets: tuple[list[Tensor], list[Tensor]] = [], []
        self._outgrown: list[Tensor] = []
        """Calls of recordings may have their addresses."""
        self._layer, self._place = 0, 0

    @property
    def num_bytes(self) -> int:
        """Of all sets."""
        return sum(each.nbytes for known in (*self._sets, self._outgrown) for each in known)

    def begin_layer(self, number: int) -> None:
        """What follows is in the memory that the last layer but one had."""
        self._layer, self._place = number, 0

    def take(self, num_bytes: int, rows: int) -> Tensor:
        """Uninitialized bytes of a layer for a recording of so many rows: uint8 [num_bytes]."""
        known, place = self._sets[self._layer % 2], self._place
        self._place += 1
        if place == len(known) or known[place].nbytes < num_bytes:
            self._outgrown += known[place : place + 1]
            known[place : place + 1] = [torch.empty(-(-num_bytes // rows) * self.most_rows, dtype=torch.uint8)]
        return known[place][:num_bytes]


class Recording:
    """The calls of one pass.

    While a thread records, its kernels are noted when they are called. A function of PyTorch raises NotRecordableError,
    unless it returns a view or allocates memory. What NumPy computes would not be repeated: layers that use it must not
    be recorded.

    Args:
        rows: Of the pass.
        memory: Of its layers.
    """

    def __init__(self, rows: int, memory: LayerMemory) -> None:
        self.layer = -1
        """The number of the layer that calls what follows; -1 before the first one."""
        self._rows = rows
        self._memory = memory
        self._calls: list[_Call] = []
        self._named: dict[int, tuple[NDArray[Any], _Input]] = {}
        """The arrays of `name_inputs` by identity, which they keep while they are here."""
        self.sources: frozenset[Hashable] = frozenset()
        """Whose inputs `repeat` needs."""
        memory.begin_layer(self.layer)

    @contextmanager
    def active(self) -> Iterator[None]:
        """This thread records."""
        _here.recording = self
        try:
            with _Guard(self):
                yield
        finally:
            _here.recording = None
        self._named.clear()
        self.sources = frozenset(given.source for call in self._calls for _, given in call.inputs)

    def begin_layer(self, number: int) -> None:
        """What follows belongs to this layer."""
        self.layer = number
        self._memory.begin_layer(number)

    def name_inputs(self, arrays: Sequence[NDArray[Any]], source: Hashable) -> None:
        """When calls with these arrays are repeated, they get those of the same source in another pass."""
        for place, array in enumerate(arrays):
            self._named.setdefault(id(array), (array, _Input(source, place)))

    def repeat(self, inputs: Mapping[Hashable, Sequence[NDArray[Any]]]) -> None:
        """Call the kernels again, with the inputs of each of `sources`."""
        for kernel, arguments, varying in self._calls:
            if varying:
                given = list(arguments)
                for place, (source, number) in varying:
                    given[place] = inputs[source][number]
                kernel(*given)
            else:
                kernel(*arguments)

    def noting(self, kernel: Kernel) -> Kernel:
        """The kernel, whose call is noted; or a function that computes with PyTorch, into memory that it gets."""

        def call(*arguments: Any) -> None:
            named = ((place, self._named.get(id(each))) for place, each in enumerate(arguments))
            inputs = tuple((place, found[1]) for place, found in named if found is not None)
            self._calls.append(_Call(kernel, arguments, inputs))
            with torch._C.DisableTorchFunction():
                kernel(*arguments)

        return call

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory of the recording."""
        with torch._C.DisableTorchFunction():
            return self._memory.take(math.prod(shape) * dtype.itemsize, self._rows).view(dtype).view(*shape)

    def array(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """The same for an array, [size]."""
        with torch._C.DisableTorchFunction():
            taken: NDArray[Any] = self._memory.take(size * np.dtype(dtype).itemsize, self._rows).numpy()
        return taken.view(dtype)


class _Guard(TorchFunctionMode):
    """Lets functions of PyTorch allocate in the memory of a recording, and refuses those that compute."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of the function."""
        del types
        name = func.__name__
        if name not in _ALLOWED:
            raise NotRecordableError(f"{name} of PyTorch")
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            if result.device.type != "cpu" or not result.is_contiguous():
                raise NotRecordableError(f"{name} of PyTorch on {result.device}, or with strides {result.stride()}")
            return self._recording.tensor(result.shape, result.dtype)
        if name in _VIEWS and any(_start(each) != _start(args[0]) for each in _tensors(result)):
            raise NotRecordableError(f"a copy by {name} of PyTorch")
        return result


def _tensors(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result


def _start(tensor: Tensor) -> int:
    """The address of its memory, from where it may be a view."""
    return tensor.untyped_storage().data_ptr()


class _Here(threading.local):
    recording: Recording | None = None
    """What the thread records."""


_here = _Here()


def active_recording() -> Recording | None:
    """That of this thread."""
    return _here.recording


def noted(kernel: Kernel) -> Kernel:
    """The kernel, whose call is noted if this thread records."""
    return kernel if _here.recording is None else _here.recording.noting(kernel)


def empty_array(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Uninitialized memory for a kernel, [size]; to be kept by the arguments of the kernel."""
    return np.empty(size, dtype) if _here.recording is None else _here.recording.array(size, dtype)

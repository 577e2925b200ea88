"""Tensors that say they are on cuda:0 and are computed on the CPU, to count what a GPU would have to do.

An operator with tensors of both devices fails, as on a GPU, and so does the use of unmapped memory. Launches, waits of
the host and copies are counted. Streams, speed, and the memory of PyTorch's allocator are not represented.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.utils._device
from gpu_support.fake_driver import FakeDriver
from gpu_support.kernel_launches import kernel_users, variant
from gpu_support.pretended_graphs import PretendedGraph, graph_functions, overwrite
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")

_VIEWS = {
    *("view", "_unsafe_view", "expand", "slice", "select", "transpose", "t", "permute", "unsqueeze", "squeeze"),
    *("split", "split_with_sizes", "as_strided", "alias", "detach", "unbind", "unfold", "_reshape_alias", "narrow"),
    *("lift_fresh", "diagonal", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operators that start no kernel."""
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal", "is_nonzero"}
"""Operators whose result the host has to know."""


@dataclass
class Work:
    """What the device did, and the lines that asked for it."""

    launches: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    """Those launches that are kernels of this project."""
    variants: set[tuple[Any, ...]] = field(default_factory=set)
    """What of these launches Triton would compile, each once."""
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from unpinned host memory, for which the host waits as well."""
    pinned_copies: int = 0
    replays: int = 0
    """Launches of graphs, each of which is one of ``launches``."""


class PretendedTensor(Tensor):
    """A tensor on the pretended device; ``content`` is on the CPU."""

    content: Tensor
    device_: PretendedDevice

    @staticmethod
    def __new__(cls, content: Tensor, device: PretendedDevice) -> PretendedTensor:
        """Wrap a tensor of the CPU."""
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        made.content, made.device_ = content, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operator with such a tensor."""
        del types
        (device,) = {each.device_ for each in tree_flatten((args, kwargs or {}))[0] if isinstance(each, cls)}
        return device.run(func, args, kwargs or {})

    # These do not come to __torch_dispatch__ as one operator.

    def tolist(self) -> Any:
        """As of a tensor."""
        self.device_.count_wait("tolist")
        return self.content.tolist()

    def __getitem__(self, index: Any) -> Any:
        """As of a tensor."""
        plain, is_gather = self.device_.index(index)
        with _disable_current_modes():
            if is_gather:
                return PretendedTensor(self.device_.launched(lambda: self.content[plain]), self.device_)
            return PretendedTensor(self.content[plain], self.device_)

    def __setitem__(self, index: Any, value: Any) -> None:
        """As of a tensor."""
        self.device_.refuse_host([value], "setitem")
        plain, _ = self.device_.index(index)
        with _disable_current_modes():
            self.device_.changed(lambda: self.content.__setitem__(plain, _content(value)))

    def data_ptr(self) -> int:
        """As of a tensor; kernels in the interpreter find the content there."""
        return self.content.data_ptr()

    def __iter__(self) -> Iterator[Any]:
        """As of a tensor."""
        return iter(self.unbind(0))


class PretendedDevice(TorchDispatchMode):
    """The device; while it is active, tensors can be created on it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.capture: PretendedGraph | None = None
        """The graph that notes all work at present."""
        self.graphs: list[PretendedGraph] = []
        """All that were captured."""
        self.arriving: list[Callable[[], Any]] = []
        """Copies to the host that are in progress; until they have ended, their targets have no values."""
        self.stuck: Exception | None = None
        """Why a kernel waits without an end, and with it all that comes after it."""
        self.driver = FakeDriver()
        self.has_ended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operator."""
        del types
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator on the CPU, and count it."""
        name = func.overloadpacket.__name__
        flat = tree_flatten((args, kwargs))[0]
        given = [each for each in flat if isinstance(each, Tensor)]
        here = any(isinstance(each, PretendedTensor) for each in given)
        is_made_here = any(isinstance(each, torch.device) and each.type == "cuda" for each in flat)
        if not here and not is_made_here:
            is_pinned = kwargs.get("pin_memory") is True  # Pinned memory needs a driver.
            if is_pinned:
                self.refuse_in_capture("an allocation of pinned memory")
            made = func(*args, **(kwargs | {"pin_memory": False} if is_pinned else kwargs))
            if is_pinned:
                made.is_pinned_here = True
            return made
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs, here)
        if name != "detach" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if not name.startswith("index") and not name.startswith("_index"):
            self.refuse_host(given, name)
        if is_made_here:
            kwargs = kwargs | {"device": "cpu"}
        plain_args, plain_kwargs = tree_map(_content, args), tree_map(_content, kwargs)

        def compute() -> Any:
            return func(*plain_args, **plain_kwargs)

        if name in _WAITS:
            self.count_wait(name)
        if name == "_local_scalar_dense":
            self.work.launches += 1
            return compute()
        if kwargs.get("out") is not None or (name.endswith("_") and not name.startswith("__")):
            self.changed(compute)
            return kwargs["out"] if kwargs.get("out") is not None else args[0]
        result = self._allocated(name, compute()) if name in _VIEWS else self.launched(compute)
        # A view shares the counter of changes of its base, which tensors of the inference mode do not have.
        is_counted = name in _VIEWS and any(not each.is_inference() for each in given)
        with torch.inference_mode(torch.is_inference_mode_enabled() and not is_counted):
            return tree_map(lambda each: PretendedTensor(each, self) if isinstance(each, Tensor) else each, result)

    def launched(self, compute: Callable[[], Any]) -> Any:
        """The result of an operator that starts a kernel."""
        self.work.launches += 1
        return compute() if self.capture is None else self.capture.computed(compute)

    def changed(self, compute: Callable[[], Any]) -> None:
        """Run an operator that changes its arguments, and starts a kernel."""
        self.work.launches += 1
        if self.capture is None:
            compute()
        else:
            self.capture.note(compute)

    def _allocated(self, name: str, made: Any) -> Any:
        if "empty" in name:
            overwrite([made])  # What is left of earlier memory could be infinite, of which Python warns at times.
            if self.capture is not None:
                self.capture.own(made)
        return made

    def use(self, content: Tensor) -> None:
        """An operator or a kernel uses this memory. Raises RuntimeError if the driver has it."""
        if self.driver.ranges:
            self.driver.check_use(content.data_ptr())
            if self.capture is not None:
                self.capture.used.append(content)

    def tensor_at(self, address: int, size: int, device: torch.device, owner: object) -> Tensor:
        """As `arena.tensor_at`."""
        assert device == DEVICE
        with _disable_current_modes():
            return PretendedTensor(self.driver.tensor_at(address, size, owner), self)

    def refuse_in_capture(self, what: str) -> None:
        """Raises RuntimeError during a capture."""
        if self.capture is not None:
            raise RuntimeError(f"{what} is not permitted during a capture, at {_line()}")

    def refuse_host(self, given: Sequence[Any], name: str) -> None:
        """Raises RuntimeError for a tensor of the host that is no scalar."""
        if any(isinstance(each, Tensor) and not isinstance(each, PretendedTensor) and each.dim() for each in given):
            raise RuntimeError(f"{name} has tensors of both devices, at {_line()}")

    def index(self, index: Any) -> tuple[Any, bool]:
        """An index for the content, and whether it has tensors."""
        items = index if isinstance(index, tuple) else (index,)
        found = [each for each in items if isinstance(each, Tensor)]
        self.work.waits[_line()] += sum(each.dtype is torch.bool for each in found)
        self.work.copies[_line()] += sum(not isinstance(each, PretendedTensor) for each in found)
        return tuple(map(_content, items)), bool(found)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, here: bool) -> Any:
        """Between the devices, or to another type."""
        source = args[1] if name == "copy_" else args[0]
        wanted = kwargs.get("device")
        target_here = here if wanted is None else torch.device(wanted).type == "cuda"
        if name == "copy_":
            target_here = isinstance(args[0], PretendedTensor)
        source_here = isinstance(source, PretendedTensor)
        is_within = source_here and target_here
        if not is_within:
            self.refuse_in_capture("a copy between host and device")
            may_overlap = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if name == "copy_" and source_here and may_overlap and getattr(args[0], "is_pinned_here", False):
                overwrite([args[0]])
                self.arriving.append(partial(args[0].copy_, _content(source).clone()))
                return args[0]
            self._count_copy(source, may_overlap=may_overlap)
        if name == "copy_":
            target, values = _content(args[0]), _content(source)
            if is_within:
                self.changed(lambda: target.copy_(values))
            else:
                target.copy_(values)
            return args[0]
        plain = {key: value for key, value in kwargs.items() if key != "device"}
        plain_args = tree_map(_content, args)
        made = self.launched(lambda: func(*plain_args, **plain)) if is_within else func(*plain_args, **plain)
        return PretendedTensor(made, self) if target_here else made

    def count_wait(self, name: str = "a wait") -> None:
        """The host waits for the device."""
        self.refuse_in_capture(name)
        if self.stuck is not None:
            raise RuntimeError(f"the host would wait without an end, at {_line()}") from self.stuck
        self.work.waits[_line()] += 1

    def _count_copy(self, source: Tensor, *, may_overlap: bool) -> None:
        if isinstance(source, PretendedTensor):
            self.count_wait()
        elif getattr(source, "is_pinned_here", False) and may_overlap:
            self.work.pinned_copies += 1
        else:
            self.work.copies[_line()] += 1


def _content(each: Any) -> Any:
    if not isinstance(each, PretendedTensor):
        return each
    each.device_.use(each.content)
    return each.content


def _line() -> str:
    """The line of the runtime that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if "megatron_runtime/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.split('megatron_runtime/')[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """A device, for the code in this block; kernels of this project run on it in Triton's interpreter."""
    from megatron_runtime.gpu import arena, driver_memory, launch

    here, plain_tensor, plain_launch, plain_close = PretendedDevice(), torch.tensor, launch.launch, arena._close

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return plain_tensor(data, device=device, **options)
        here.refuse_in_capture("a copy from the host")
        here.work.copies[_line()] += 1
        with _disable_current_modes():
            return PretendedTensor(plain_tensor(data, **options), here)

    def counted_launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **constants: Any) -> None:
        here.refuse_host(arguments, "launch")
        name, plain_arguments = kernel.fn.__name__, [_content(each) for each in arguments]
        here.work.launches += 1
        here.work.variants.add(variant(kernel, plain_arguments, constants))
        if here.capture is not None:
            here.capture.note_kernel(name, lambda: plain_launch(kernel, grid, plain_arguments, **constants))
            return
        here.work.kernels[name] += 1
        with _disable_current_modes():
            plain_launch(kernel, grid, plain_arguments, **constants)

    def close(*args: Any) -> None:
        if not here.has_ended:  # The garbage collector may find an arena later, without the functions below.
            plain_close(*args)

    torch.utils._device._device_constructors()  # It is cached for ever, and reads `torch.tensor`, replaced below.
    users = kernel_users(plain_launch)
    without_driver = {"_lazy_init": lambda: None, "set_device": lambda _: None, "synchronize": lambda _=None: None}
    replacing = without_driver | graph_functions(here)
    memory = (
        patch.object(driver_memory, "import_driver", lambda: here.driver),
        patch.multiple(arena, tensor_at=here.tensor_at, _close=close),
    )
    with patch.object(torch, "tensor", tensor), patch.multiple(torch.cuda, **replacing), memory[0], memory[1]:
        replaced = [patch.object(module, "launch", counted_launch) for module in users]
        for each in replaced:
            each.start()
        try:
            with here:
                yield here
        finally:
            here.has_ended = True
            for each in replaced:
                each.stop()

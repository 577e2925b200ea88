"""Common parts of compiled kernels: the compiler options, and float32 or bfloat16 in arrays.

A kernel gets a bfloat16 tensor as the uint16 of its bits, and computes in float32 for both types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, from_dtype, njit, types  # type: ignore[attr-defined]
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.kernels.kernel_cache import use_kernel_locator
from megatron_runtime.model.kernels.kernel_compiler import from_cache_only
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.threads import can_share_threads, kernel_threads

KINDS = frozenset({torch.float32, torch.bfloat16})
"""The dtypes that kernels support."""

LOG2_E = 1.44269504
LOG_2 = (0.693359375, 2.12194440e-4)
"""As a difference, whose first number has few digits, so that its multiples are exact (Cody and Waite)."""
SERIES = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of the polynomial of an exponential, without those of the last two terms, which are 1."""

# Not "nnan" and "ninf": a NaN in the weights has to appear in the results. Not "arcp": the last digit of an estimated
# reciprocal depends on the vendor of the processor.
_FAST = {"reassoc", "contract", "nsz"}
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def compile_kernel(
    function: Callable[..., None], signature: Any, *, parallel: bool = True, fast: bool = True
) -> Kernel:
    """Compile for this processor; only in a function with `kernel_factory`.

    A loop over ``prange`` runs on the threads that PyTorch uses. With ``fast``, the order of sums is the compiler's
    choice, which may depend on the processor.
    """
    use_kernel_locator()
    options = _OPTIONS | {"parallel": parallel and can_share_threads(), "fastmath": _FAST if fast else False}
    # Numba's cache has a place for each name and signature, whatever the options are.
    function.__qualname__ += "".join(f".{name}" for name in ("parallel", "fastmath") if options[name])
    try:
        with from_cache_only(function):
            compiled: Kernel = njit(signature, cache=True, **options)(function)
    except RuntimeError:
        # Numba raises this when no cache folder is writable.
        compiled = njit(signature, **options)(function)
    return compiled


def import_loader() -> None:
    """Import what numba needs to load its first kernel: 73 modules, which take a sixth of a second."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def scalar(narrow: bool) -> Any:
    """Numba's type of floating-point elements: the bits of bfloat16 if ``narrow``, else float32."""
    return from_dtype(np.dtype(element(narrow)))


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The same memory for a kernel. The dtype of ``tensor`` is one of KINDS, or an integer type."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def address(tensor: Tensor) -> int:
    """That of a contiguous tensor, for a kernel that uses `array_at`. To pass an array takes a microsecond longer,
    which matters in every layer.
    """
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def element(narrow: bool) -> type[np.uint16 | np.float32]:
    """NumPy's type of floating-point elements, as `scalar`."""
    return np.uint16 if narrow else np.float32


def _pointer_by_type(_: Any, place: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(place), generate


_pointer_to: Any = intrinsic(_pointer_by_type)


@njit(inline="always")
def array_at(place: Any, shape: Any, kind: Any) -> Any:
    """In compiled code: an array of numbers of an `element` type at an `address`."""
    return carray(_pointer_to(place), shape, kind)


def even_shares(rows: int) -> NDArray[np.int64]:
    """Start of each thread's share of ``rows`` equal rows, and the end: int64 [threads + 1], not to be changed."""
    return _even_shares(rows, kernel_threads())


@lru_cache(4096)
def _even_shares(rows: int, threads: int) -> NDArray[np.int64]:
    return np.arange(threads + 1) * rows // threads


def widen(value: Any) -> Any:
    """In compiled code: float32 from an element."""


@overload(widen, strict=False)
def _widen_by_type(value: Any) -> Any:
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def narrowed(value: Any, array: Any) -> Any:
    """In compiled code: an element of ``array`` from a float32, rounded to nearest, half to even."""


@overload(narrowed, strict=False)
def _narrowed_by_type(_value: Any, array: Any) -> Any:
    if isinstance(array.dtype, types.Integer):
        return lambda _value, array: _bfloat16_bits(_value)  # noqa: ARG005
    return lambda _value, array: _value  # noqa: ARG005


def rounded(value: Any, array: Any) -> Any:
    """In compiled code: a float32 rounded to the precision of ``array``."""


@overload(rounded, strict=False)
def _rounded_by_type(_value: Any, array: Any) -> Any:
    # Not a compiled function, which would count its reference to the array: that keeps loops from using vectors.
    if isinstance(array.dtype, types.Integer):
        return lambda _value, array: widen(_bfloat16_bits(_value))  # noqa: ARG005
    return lambda _value, array: _value  # noqa: ARG005


@njit(inline="always")
def _bfloat16_bits(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # Rounding up could turn the bits of a NaN into another number.
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@njit(inline="always")
def logistic(x: Any) -> Any:
    """The sigmoid of x."""
    return np.float32(1) / (np.float32(1) + exponential(-x))


@njit(inline="always")
def exponential(x: Any) -> Any:
    """e^x by a power of two and a polynomial (Cody and Waite), within 2 units in the last place."""
    # Only a NaN is unequal to itself; it has to stay NaN.
    x = max(min(x, np.float32(88.0)), np.float32(-87.0)) if x == x else x
    power = np.floor(x * np.float32(LOG2_E) + np.float32(0.5))
    rest = x - power * np.float32(LOG_2[0]) + power * np.float32(LOG_2[1])
    series = np.float32(SERIES[0])
    series = series * rest + np.float32(SERIES[1])
    series = series * rest + np.float32(SERIES[2])
    series = series * rest + np.float32(SERIES[3])
    series = series * rest + np.float32(SERIES[4])
    series = series * rest + np.float32(SERIES[5])
    series = series * rest * rest + rest + np.float32(1.0)
    return series * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)

"""What Triton would compile for launches of kernels, and the modules with launches."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def variant(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> tuple[Any, ...]:
    """The properties of the arguments for which Triton compiles a kernel anew: constants, types, numbers that are 1 or
    multiples of 16, and addresses that are."""
    general = kernel.kwargs.get("do_not_specialize") or ()
    found: list[Any] = [kernel.fn.__name__, *sorted(constants.items())]
    for name, given in zip(kernel.arg_names, arguments, strict=False):
        if isinstance(given, Tensor):
            found.append((name, given.dtype, given.data_ptr() % 16 == 0))
        elif isinstance(given, int):
            is_wide = not -(2**31) <= given < 2**31
            found.append((name, is_wide) if name in general else (name, is_wide, given == 1, given % 16 == 0))
    return tuple(found)


def kernel_users(launch: Any) -> list[Any]:
    """The modules that launch kernels."""
    from megatron_runtime import gpu

    names = (each.name for each in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."))
    return [module for module in map(importlib.import_module, names) if getattr(module, "launch", None) is launch]

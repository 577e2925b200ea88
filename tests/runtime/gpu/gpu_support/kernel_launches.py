"""What Triton would compile for launches of kernels, and the modules with launches."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import megatron_runtime

PACKAGE = "megatron_runtime.gpu"


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


def launched_kernels() -> set[str]:
    """The names of the functions of Triton that modules of the host import, because no others can be launched.

    Raises:
        AssertionError: A module imports a whole module of kernels, so that the kernels it launches are unknown.
    """
    from triton.runtime import KernelInterface

    return {found.fn.__name__ for found in _imported_from_kernels() if isinstance(found, KernelInterface)}


def _imported_from_kernels() -> Iterator[Any]:
    """What other modules of the runtime import from those of kernels in PACKAGE, also within functions."""
    for path in Path(megatron_runtime.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if PACKAGE not in text or (path.parent.name == "gpu" and path.stem.endswith("_kernels")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
                assert not any(each.name.endswith("_kernels") for each in node.names), path
                if node.module.endswith("_kernels"):
                    module = importlib.import_module(node.module)
                    yield from (getattr(module, each.name) for each in node.names)
            elif isinstance(node, ast.Import):
                assert not any(each.name.startswith(PACKAGE) for each in node.names), path

"""Triton's interpreter with less work for each operation, and the same results.

Of Triton 3.7, measured with the tests of this folder: 30% of the time goes to the search for all functions of the
language, at each launch and at each call of one kernel function by another; 20% to an addition in 64 bits beside each
addition of integers, whose result an assertion would use that needs the option ``debug``; 20% to objects for types and
shapes that are made anew for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_CHECKING = "binary_op_type_checking_impl"


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Replace these parts of the interpreter for the code in this block."""
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with ExitStack() as parts:
        for owner, name, part in (
            (interpreter, "_patch_lang", _Language(interpreter._patch_lang).patched),
            (interpreter, "_get_np_dtype", _numpy_type(interpreter._get_np_dtype)),
            (interpreter.interpreter_builder, "options", options),
            (tl.tensor, "__init__", _init_tensor),
            (tl.block_type, "__init__", _block_type_init(tl.block_type.__init__)),
            (TritonSemantic, "broadcast_impl_value", _broadcast(TritonSemantic.broadcast_impl_value)),
            (TritonSemantic, _CHECKING, _checked(getattr(TritonSemantic, _CHECKING))),
        ):
            parts.enter_context(patch.object(owner, name, part))
        yield


class _Language:
    """The functions of the language while a kernel runs, which are found once."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self._find = find
        self._is_running = False

    def patched(self, kernel: Any) -> _Language:
        """As ``_patch_lang``: an object whose ``restore`` undoes it, except for a function that a kernel calls."""
        del kernel
        if self._is_running:
            return self
        for owner, name, _, new in self._changes:
            setattr(owner, name, new)
        self._is_running = True
        return self

    def restore(self) -> None:
        """After the kernel."""
        self._is_running = False
        for owner, name, old, _ in self._changes:
            if old is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    @cached_property
    def _changes(self) -> list[tuple[Any, str, Any, Any]]:
        """The attributes with their old and new values, of kernels and of the functions of Triton that they call."""
        scope = self._find(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        first: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        for owner, name, old in scope._changes:
            new = getattr(owner, name)
            builtin = (getattr(new, "__kwdefaults__", None) or {}).get("member")
            first.setdefault((id(owner), name), (owner, name, old, _with_semantic(builtin) if builtin else new))
        scope.restore()
        return [*first.values()]


def _with_semantic(builtin: Any) -> Callable[..., Any]:
    wrapped = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return wrapped(*args, **kwargs)

    return call


def _numpy_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known = {}

    def numpy_type(given: Any) -> Any:
        if isinstance(given, tl.block_type):
            given = given.element_ty
        if isinstance(given, tl.pointer_type):
            return np.dtype(np.uint64)
        if given.name not in known:
            known[given.name] = find(given)
        return known[given.name]

    return numpy_type


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor as the language has it, and the number of its elements."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(prod(sizes))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


def _block_type_init(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[tuple[int, ...], str], tuple[Any, int, str]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if isinstance(shape, tl.tuple) else shape)
        key = (sizes, element_ty.name)
        if any(type(size) is not int for size in sizes):
            init(self, element_ty, shape)
        elif key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)

    return init_block_type


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        is_same = left.is_block() and right.is_block() and left.shape.values == right.shape.values
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    return broadcast_unequal


def _checked(check: Callable[..., Any]) -> Callable[..., Any]:
    """The types and shapes of two operands, of which most have the same type: int32 or float32."""

    def checked(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        is_division = len(options) > 3 and options[3]
        if named or is_division or not isinstance(lhs, tl.tensor) or lhs.type.scalar.is_ptr():
            return check(self, lhs, rhs, *options, **named)
        kind = lhs.type.scalar
        if isinstance(rhs, tl.tensor):
            is_same = rhs.type.scalar.name == kind.name
        elif type(rhs) is int:
            is_same = kind.name == "int32" and -(2**31) <= rhs < 2**31
        else:
            is_same = type(rhs) is float and kind.name == "fp32"
        if not is_same:
            return check(self, lhs, rhs, *options)
        if not isinstance(rhs, tl.tensor):
            rhs = self.scalar_constant(rhs, kind)
        return self.broadcast_impl_value(lhs, rhs)

    return checked

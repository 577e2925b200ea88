"""Ranges of numbers, declared in annotations, and the checks that follow from annotations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from megatron_runtime.errors import InvalidRequestError

Check = Callable[[str, Any], None]
"""Raises InvalidRequestError, given the name of a field and its value."""


@dataclass(frozen=True)
class Range:
    """The finite numbers from a minimum to a maximum."""

    minimum: float
    maximum: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum and value != math.inf

    def __str__(self) -> str:
        if math.isinf(self.maximum):
            return f"of at least {self.minimum}"
        return f"from {self.minimum} to {self.maximum}"


def ranges_of(kind: type) -> dict[str, Range]:
    """The ranges of the annotated fields of a dataclass, by name."""
    found: dict[str, Range] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            found.update((name, extra) for extra in hint.__metadata__ if isinstance(extra, Range))
    return found


def checks_of(kind: type) -> dict[str, Check]:
    """The checks of a dataclass's fields that have a range or are flags."""
    ranges = ranges_of(kind)
    checks: dict[str, Check] = {}
    for name, hint in get_type_hints(kind).items():
        if name in ranges:
            is_integer = float not in (hint, *get_args(hint))
            checks[name] = _integer(ranges[name]) if is_integer else _number(ranges[name])
        elif hint is bool:
            checks[name] = check_flag
    return checks


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_flag(name: str, value: Any) -> None:
    """Reject a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r} must be true or false", field=name)


def _number(limits: Range) -> Check:
    def check(name: str, value: Any) -> None:
        if not is_number(value) or value not in limits or value > sys.float_info.max:
            raise InvalidRequestError(f"{name}={value!r} must be a number {limits}", field=name)

    return check


def _integer(limits: Range) -> Check:
    def check(name: str, value: Any) -> None:
        if not is_integer(value) or value not in limits:
            raise InvalidRequestError(f"{name}={value!r} must be an integer {limits}", field=name)

    return check

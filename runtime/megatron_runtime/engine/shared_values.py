"""Values that requests with equal parameters share, as the choices of one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

_Value = TypeVar("_Value")
_Args = ParamSpec("_Args")


class SharedValues(Generic[_Args, _Value]):
    """Computes a value once for equal arguments, as long as a request holds it.

    A cache of a fixed size would keep the values of requests that ended, and they may be large.

    Args:
        compute: From hashable arguments to an object that weak references can refer to and that does not change.
    """

    def __init__(self, compute: Callable[_Args, _Value]) -> None:
        self._compute = compute
        self._known: WeakValueDictionary[Hashable, _Value] = WeakValueDictionary()

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Value:
        """The value for these arguments."""
        key = (args, *kwargs.items())
        value = self._known.get(key)
        if value is None:
            value = self._known[key] = self._compute(*args, **kwargs)
        return value

    def __len__(self) -> int:
        return len(self._known)

"""The serialization of errors, as a class with Megatron's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.errors import ContextOverflowError, deserialize_error, serialize_error


class ContextErrorFactory:
    """Errors of requests as plain dicts, and back."""

    @classmethod
    def serialize(cls, error: ContextOverflowError) -> dict[str, Any]:
        """A dict with type, request_id, message and is_transient."""
        assert isinstance(error, ContextOverflowError), f"{type(error).__name__} is no ContextOverflowError"
        return serialize_error(error)

    @classmethod
    def deserialize(cls, obj: Mapping[str, Any]) -> ContextOverflowError:
        """The inverse of serialize. Raises KeyError for an unknown type."""
        error = deserialize_error(dict(obj))
        if not isinstance(error, ContextOverflowError):
            raise KeyError(obj["type"])
        return error

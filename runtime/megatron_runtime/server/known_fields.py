"""Reads the fields of a large body that its endpoint knows, and checks limits on their text before it is parsed.

As Python objects, JSON of small values takes up to ten times its size, and Python's allocator keeps a part of that.
"""

from __future__ import annotations

import builtins
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, to_json
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from megatron_runtime.server.errors import ApiError

Path = tuple[str | int, ...]
_TOO_LONG: Final = "has {size} characters; give at most {limit}"
_LONGEST_SHOWN = 200
"""Characters of a refused value for the error, whose message shows fewer."""


def checked_size(value: Any, size: int, limit: int) -> Any:
    """The value; raises PydanticCustomError if its size is beyond the limit."""
    if size > limit:
        raise PydanticCustomError("too_long", _TOO_LONG, {"size": size, "limit": limit})
    return value


class JsonAtMost:
    """Limits the characters of a field as JSON, or of a text. KnownFields finds it in the type of the field."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of the field's type, after this check."""
        return no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        try:
            size = len(value) if isinstance(value, str) else len(to_json(value))
        except ValueError:
            raise ValueError("is nested too deeply, or has a lone surrogate, which is no valid text") from None
        return checked_size(value, size, self.limit)

    def parsed(self, text: msgspec.Raw, path: Path) -> Any:
        """The value of a field; RequestValidationError, as from pydantic, if its text can't be within the limit."""
        if len(text) > self.limit and (size := _least_characters(text)) > self.limit:
            shown = bytes(memoryview(text)[:_LONGEST_SHOWN]).decode(errors="replace")
            message = _TOO_LONG.format(size=size, limit=self.limit)
            raise RequestValidationError([{"type": "too_long", "loc": path, "msg": message, "input": shown}])
        return msgspec.json.decode(text)


def _least_characters(text: msgspec.Raw) -> int:
    """Without white space, and as if each escape were one character; exact if there are none of both."""
    compact = msgspec.json.format(text, indent=-1)
    return len(compact) - compact.count(b"\\") - 4 * compact.count(rb"\u")


class _FieldReader(NamedTuple):
    """Reads the JSON of a type that has limits."""

    type: Any
    """msgspec's type for its structure; the values in it are JSON."""
    parsed: Callable[[Any, Path], Any]
    """The Python objects of a decoded structure, whose path in the body is given for errors."""


class KnownFields:
    """The fields of a pydantic model of bodies that ignores others: those are checked as JSON, and take no memory.

    Objects within the body keep their unknown fields, unless they have fields with limits and ignore others.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._reader = _of_model(model) or _of_fields(model, {})
        self._decoder = msgspec.json.Decoder(self._reader.type)

    def parsed(self, raw: bytes) -> Any:
        """The known fields of a JSON object; None for other JSON.

        Raises:
            RequestValidationError: A field is beyond its limit.
            ApiError: 400 for a field that has such fields and is no object or list, as it should be.
            ValueError: This is no JSON.
            RecursionError: It is nested too deeply.
        """
        try:
            fields = self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$.")
            if not place:
                return None
            param = re.sub(r"\[(\d+)\]", r".\1", place.removesuffix("`"))
            raise ApiError(400, f"{param}: {message[:1].lower()}{message[1:]}", param=param) from None
        return self._reader.parsed(fields, ())


def _reader(kind: Any, metadata: Sequence[Any] = ()) -> _FieldReader | None:
    """How to read a type with limits; None for one without."""
    for each in metadata:
        if isinstance(each, JsonAtMost):
            return _FieldReader(msgspec.Raw, each.parsed)
    arguments = get_args(kind)
    match get_origin(kind):
        case typing.Annotated:
            return _reader(arguments[0], arguments[1:])
        case typing.Union | types.UnionType:
            values = [argument for argument in arguments if argument is not type(None)]
            return _reader(values[0]) if len(values) == 1 else None
        case builtins.list:
            return _of_list(_reader(arguments[0]))
    return _of_model(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _of_list(item: _FieldReader | None) -> _FieldReader | None:
    if item is None:
        return None
    parsed = item.parsed

    def all_parsed(items: Any, path: Path) -> Any:
        return None if items is None else [parsed(each, (*path, index)) for index, each in enumerate(items)]

    return _FieldReader(list[item.type] | None, all_parsed)  # type: ignore[name-defined]


def _of_model(model: type[BaseModel]) -> _FieldReader | None:
    if model.model_config.get("extra", "ignore") != "ignore":
        return None
    found = {name: _reader(field.annotation, field.metadata) for name, field in model.model_fields.items()}
    limited = {name: reader for name, reader in found.items() if reader is not None}
    return _of_fields(model, limited) if limited else None


def _of_fields(model: type[BaseModel], limited: Mapping[str, _FieldReader]) -> _FieldReader:
    plain = _FieldReader(msgspec.Raw, lambda text, _: msgspec.json.decode(text))
    readers = {field.alias or name: limited.get(name, plain) for name, field in model.model_fields.items()}
    fields = [(name, reader.type, msgspec.UNSET) for name, reader in readers.items()]
    structure = msgspec.defstruct(model.__name__, fields)

    def all_parsed(values: Any, path: Path) -> Any:
        if values is None:
            return None
        given = ((name, getattr(values, name)) for name in readers)
        return {name: readers[name].parsed(value, (*path, name)) for name, value in given if value is not msgspec.UNSET}

    return _FieldReader(structure | None, all_parsed)

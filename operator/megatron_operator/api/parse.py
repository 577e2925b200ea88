"""Parses a resource. Errors name each wrong field, its value and the fix."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_operator.api.v1alpha1 import API_VERSION, KIND, MegatronInference
from megatron_operator.api.v1alpha1.base import (
    ABSOLUTE_PATH,
    ADAPTER_NAME,
    DNS_NAME,
    FIELD_PATH,
    HOST_NAME,
    IMAGE_REFERENCE,
    LABEL_KEY,
    MISPLACED,
)
from megatron_operator.api.v1alpha1.resource import LONGEST_NAME

PATTERNS_IN_WORDS = {
    ADAPTER_NAME: "must hold only letters, digits, '-', '_', '.', ':' and '/', and not start with a mark; correct it",
    ABSOLUTE_PATH: "must be an absolute path; start it with /",
    DNS_NAME: "must hold only a-z, 0-9, '-' and '.', and start and end with a letter or digit; correct it",
    FIELD_PATH: "must be a path of fields, like securityContext.runAsUser; correct it",
    HOST_NAME: "must be a lower-case DNS name, like chat.example.com or *.example.com; correct it",
    IMAGE_REFERENCE: "must be an image reference, like registry.example.com/models/chat:1; correct it",
    LABEL_KEY: "must be a label key, like topology.kubernetes.io/zone; correct it",
}


@dataclass(frozen=True)
class FieldError:
    """One error: the field, its value, and the fix."""

    field: str
    value: Any
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.value)}: {self.message}"


class InvalidResource(ValueError):
    """The resource is invalid; ``errors`` has at least one entry."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = tuple(errors)

    @classmethod
    def of(cls, field: str, value: Any, message: str) -> Self:
        """An InvalidResource with one error."""
        return cls([FieldError(field, value, message)])


def parse_resource(obj: Mapping[str, Any]) -> MegatronInference:
    """Parse ``obj``, a YAML document or an API object.

    The parser skips fields of the status that it cannot read. Raises InvalidResource with all errors at once.
    """
    if not isinstance(obj, Mapping):
        raise InvalidResource.of("(document)", obj, f"is not a resource; start it with kind: {KIND}")
    errors = [*_identity_errors(obj)]
    if errors:
        raise InvalidResource(errors)
    wanted = {"metadata": obj.get("metadata"), "spec": obj.get("spec")}
    try:
        return MegatronInference.model_validate({**wanted, "status": obj.get("status") or {}})
    except ValidationError as error:
        mistakes = [detail for detail in error.errors() if detail["loc"][:1] != ("status",)]
    if not mistakes:
        return MegatronInference.model_validate(wanted)
    raise InvalidResource([_field_error(detail) for detail in mistakes])


def _identity_errors(obj: Mapping[str, Any]) -> Iterator[FieldError]:
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if obj.get(field) != expected:
            yield FieldError(field, obj.get(field), f"set it to {expected}")
    for field in ("metadata", "spec"):
        if not isinstance(obj.get(field), Mapping):
            yield FieldError(field, obj.get(field), "is required; see manifests/samples for an example")


def _field_error(detail: ErrorDetails) -> FieldError:
    location = tuple(part for part in detail["loc"] if part != "[key]")
    context: Mapping[str, Any] = detail.get("ctx") or {}
    if detail["type"] == MISPLACED:
        inside = context["field"].split(".") if context["field"] else ()
        return FieldError(_path((*location, *inside)), context["value"], detail["msg"])
    field = _path(location)
    value = None if detail["type"] == "missing" else detail["input"]
    if field == "metadata.name" and value is not None:
        return FieldError(
            field,
            value,
            f"must start with a letter and have at most {LONGEST_NAME} of a-z, 0-9 and '-', since Services and pods"
            " are named after it; choose another name",
        )
    return FieldError(field, value, _fix(detail, location))


def _fix(detail: ErrorDetails, location: tuple[int | str, ...]) -> str:
    context: Mapping[str, Any] = detail.get("ctx") or {}
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(str(location[-1]), location[:-1])
        case "missing":
            return "is missing; set it"
        case "enum" | "literal_error":
            return f"must be {context['expected']}; choose one of them"
        case "greater_than_equal":
            return f"must be at least {context['ge']}; raise it"
        case "less_than_equal":
            return f"must be at most {context['le']}; lower it"
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return PATTERNS_IN_WORDS.get(context["pattern"], f"must match {context['pattern']}; correct it")
        case "too_short":
            return f"needs at least {context['min_length']}; add one"
        case "too_long":
            return f"may have {context['max_length']} at most; leave some out"
        case "string_too_short":
            return "must not be empty; set it or leave the field out"
        case _:
            expected = detail["msg"].removeprefix("Input should be ")
            return f"should be {expected}; correct it"


def _unknown(name: str, parent: tuple[int | str, ...]) -> str:
    known = _known_fields(parent)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    lowered = {field.lower(): field for field in known}
    if not near and name.lower() in lowered:
        near = [lowered[name.lower()]]
    if near:
        return f"unknown field; did you mean {near[0]}?"
    return f"unknown field; remove it (known here: {', '.join(known)})"


def _known_fields(location: tuple[int | str, ...]) -> list[str]:
    model: Any = MegatronInference
    for part in location:
        model = next((field.annotation for field in model.model_fields.values() if field.alias == part), None)
        model = _model_in(model)
        if model is None:
            return []
    return [str(field.alias) for field in model.model_fields.values()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    # Text that looks like a number or a boolean keeps its quotes, because they are the error.
    plain = isinstance(value, str) and value and not re.fullmatch(r"[\d.]+|true|false", value, re.IGNORECASE)
    shown = value if plain else repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."

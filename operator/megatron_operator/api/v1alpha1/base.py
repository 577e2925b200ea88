"""Common rules for all parts of the resource: camelCase names, no unknown fields, no implicit conversions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

Integer = Annotated[int, Strict()]
Boolean = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DnsName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)]
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
HOST_NAME = r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
HostName = Annotated[str, Field(max_length=253, pattern=HOST_NAME)]
ABSOLUTE_PATH = r"^/"
AbsolutePath = Annotated[str, Field(max_length=1024, pattern=ABSOLUTE_PATH)]
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"
AdapterName = Annotated[str, Field(max_length=255, pattern=ADAPTER_NAME)]
IMAGE_REFERENCE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
ImageReference = Annotated[str, Field(max_length=1024, pattern=IMAGE_REFERENCE)]
LABEL_KEY = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(max_length=317, pattern=LABEL_KEY)]
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
_BYTE = r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
CIDR = rf"^(({_BYTE}\.){{3}}{_BYTE}/(3[0-2]|[12]?[0-9])|[0-9A-Fa-f]{{0,4}}(:[0-9A-Fa-f]{{0,4}}){{2,7}}/[0-9]{{1,3}})$"
Cidr = Annotated[str, Field(max_length=64, pattern=CIDR)]
FIELD_PATH = r"^[A-Za-z][A-Za-z0-9-]*(\.[A-Za-z][A-Za-z0-9-]*)*$"
FieldPath = Annotated[str, Field(max_length=256, pattern=FIELD_PATH)]

MISPLACED = "misplaced"
"""Error type of checks across fields."""


def misplaced(field: str, value: object, message: str) -> PydanticCustomError:
    """An error of a check across fields. ``field`` is the dotted path from the checked part to the wrong field."""
    return PydanticCustomError(MISPLACED, "{message}", {"field": field, "value": value, "message": message})


class Part(BaseModel):
    """A part of the spec. The string below a field is its description in the CRD."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


def require_one(part: Part, message: str) -> None:
    """Raises ValueError, which begins with ``message``, unless exactly one field of a part is set."""
    given = [field.alias for name, field in type(part).model_fields.items() if getattr(part, name) is not None]
    if len(given) != 1:
        fix = f"not {' and '.join(map(str, given))}: remove all but one" if given else "and none is set: set one"
        raise ValueError(f"{message}, {fix}")


class Report(BaseModel):
    """A part of the status. Only the operator writes it; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )

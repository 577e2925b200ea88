"""Kubernetes quantities and durations in a resource.

``Quantity`` is a number of bytes, ``MemorySize`` a positive one, ``ResourceQuantity`` an amount of any resource of a
node, and ``Duration`` a number of seconds. Each keeps its text, so that users read what they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import Any, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
POSITIVE_QUANTITY_PATTERN = r"^(0*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
RESOURCE_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"

LONGEST_DURATION = "87600h"
"""Ten years. Longer ones are mistakes, and could exceed what a timestamp and a grace period can hold."""

INTEGER_BITS = 63
"""API servers read larger numbers as floating-point numbers."""

_BYTES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}
_FACTORS = {"m": Decimal("0.001"), **{suffix: Decimal(factor) for suffix, factor in _BYTES.items()}}
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")


class _Written:
    """A number that is parsed from a text and serialized as that text."""

    text: str

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        make: Callable[[Any], Any] = cls

        def validate(value: Any) -> Any:
            return value if isinstance(value, cls) else make(value)

        written = core_schema.plain_serializer_function_ser_schema(lambda value: value.text)
        return core_schema.no_info_plain_validator_function(validate, serialization=written)


class Quantity(int, _Written):
    """An amount of memory in bytes, written like ``256Mi``, ``20Gi`` or ``1.5G``; a bare number is bytes."""

    def __new__(cls, value: str | int) -> Self:
        """Raises ValueError when ``value`` is not an amount of memory."""
        made = super().__new__(cls, _bytes(value))
        made.text = str(value)
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
        }


class MemorySize(Quantity):
    """A ``Quantity`` of at least one byte."""

    def __new__(cls, value: str | int) -> Self:
        """Raises ValueError when ``value`` is not a positive amount of memory."""
        made = super().__new__(cls, value)
        if made < 1:
            raise ValueError("must be more than 0; write it like 256Mi or 20Gi")
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = super().__get_pydantic_json_schema__(schema, handler)
        return {**whole, "minimum": 1, "pattern": POSITIVE_QUANTITY_PATTERN}


class ResourceQuantity(Decimal, _Written):
    """An amount of a node's resource that is not negative, written like ``500m``, ``2`` or ``16Gi``."""

    def __new__(cls, value: str | int) -> Self:
        """Raises ValueError when ``value`` is not such an amount."""
        made = super().__new__(cls, _amount(value))
        made.text = str(value)
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "pattern": RESOURCE_PATTERN,
        }


class Duration(float, _Written):
    """A duration of at most ten years in seconds, written like ``90s``, ``2m`` or ``1h30m``."""

    def __new__(cls, value: str) -> Self:
        """Raises ValueError when ``value`` is not a duration, or too long."""
        made = super().__new__(cls, _seconds(value))
        made.text = value
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        longest = {
            "rule": f"duration(self) <= duration('{LONGEST_DURATION}')",
            "message": f"is longer than {LONGEST_DURATION}, ten years; set a shorter one",
        }
        return {
            "type": "string",
            "pattern": DURATION_PATTERN,
            "maxLength": 32,
            "x-kubernetes-validations": [longest],
        }


def _amount(value: str | int) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be an amount; write it like 500m, 2 or 16Gi")
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        raise ValueError("is too large for a number in a resource; write it with a suffix, like 16Gi")
    if re.fullmatch(RESOURCE_PATTERN[1:-1], str(value)) is None:
        raise ValueError("is not an amount of at least 0; write it like 500m, 2 or 16Gi")
    number = str(value).rstrip("mkKMGTPi")
    return Decimal(number) * _FACTORS[str(value).removeprefix(number)]


def _bytes(value: str | int) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be an amount of memory; write it like 256Mi or 20Gi")
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        raise ValueError("is too large for a number in a resource; write it like 256Mi or 20Gi")
    match = re.fullmatch(QUANTITY_PATTERN[1:-1], str(value))
    if match is None:
        raise ValueError("is not an amount of memory; write it like 256Mi or 20Gi (suffixes Ki Mi Gi Ti Pi, k M G T P)")
    suffix = match.group(2) or ""
    exact = Decimal(str(value).removesuffix(suffix)) * _BYTES[suffix]
    return int(exact.to_integral_value(ROUND_CEILING))  # rounded up to whole bytes, as Kubernetes does


def _seconds(value: str) -> float:
    if not isinstance(value, str):
        raise ValueError("must be text with a unit; write it like 90s, 2m or 1h30m")
    if re.fullmatch(DURATION_PATTERN[1:-1], value) is None:
        raise ValueError("is not a duration; write it like 90s, 2m or 1h30m (units ms s m h)")
    length = _total_seconds(value)
    if length > _total_seconds(LONGEST_DURATION):
        raise ValueError(f"is longer than {LONGEST_DURATION}, ten years; set a shorter one")
    return length


def _total_seconds(duration: str) -> float:
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(duration)))

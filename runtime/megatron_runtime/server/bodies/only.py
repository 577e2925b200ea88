"""Fields that are known and not implemented: rejected by name instead of silently without effect."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function


class Only:
    """Accepts the neutral values of a field that this server does not implement."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of the field's type, followed by this check."""
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The allowed values, for ``/openapi.json``."""
        return {**handler(schema), "enum": list(self._neutral)}

    def _check(self, value: Any) -> Any:
        if value not in self._neutral:
            raise ValueError("is not supported by this server; leave it out")
        return value

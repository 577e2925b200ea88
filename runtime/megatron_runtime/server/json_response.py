"""JSON responses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pydantic_core
from starlette.responses import JSONResponse

to_json = partial(pydantic_core.to_json, inf_nan_mode="null")
"""A value as JSON bytes; PydanticSerializationError if it can't be expressed in JSON or is nested too deeply."""


class JsonResponse(JSONResponse):
    """Starlette's JSONResponse, serialized in a tenth of the time."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)

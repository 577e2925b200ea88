"""Fields that are null in a request."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator


class NullMeansAbsent(BaseModel):
    """A body in which null is the same as no field: OpenAI's clients may send it for a field at its default."""

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body

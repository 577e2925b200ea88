"""The arguments of an earlier call, for chat templates."""

from __future__ import annotations

import json
from typing import Any


class JoinableArguments(dict[str, Any]):
    """A mapping, as most templates expect, that is its JSON where a template joins it with text.

    DeepSeek's templates expect the JSON.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)

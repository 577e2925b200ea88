"""What whoever runs the operator decides for all resources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

IMAGE_VARIABLE = "MEGATRON_RUNTIME_IMAGE"
DEFAULT_IMAGE = f"megatron-inference/runtime:{version('megatron-inference')}"


@dataclass(frozen=True)
class Settings:
    """Defaults for what a resource leaves out."""

    image: str = DEFAULT_IMAGE
    """Image of the runtime for resources without ``spec.image``."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads ``MEGATRON_RUNTIME_IMAGE``."""
        return cls(image=environment.get(IMAGE_VARIABLE) or DEFAULT_IMAGE)

"""Fields that ask for more or less reasoning or text, and what chat templates get of them."""

from __future__ import annotations

from typing import Any, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def effort_variables(effort: Effort | None, verbosity: Verbosity | None) -> dict[str, Any]:
    """The variables of a chat template; templates that do not know one ignore it.

    Templates know an effort as ``reasoning_effort``, or only whether the model thinks, as ``enable_thinking`` (Qwen3,
    SmolLM3, GLM-4.5) or ``thinking`` (DeepSeek-V3.1, Granite).
    """
    variables: dict[str, Any] = {}
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return variables if verbosity is None else {**variables, "verbosity": verbosity}

"""The configuration of an adapter: peft's ``adapter_config.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_runtime.errors import CheckpointError

_Value = TypeVar("_Value")

CONFIG_FILE = "adapter_config.json"
_REFUSED = {
    "use_dora": "DoRA scales the merged matrix; train with use_dora=False",
    "lora_bias": "biases are not adapted; train with lora_bias=False",
    "modules_to_save": "whole modules are not replaced; train without modules_to_save",
    "layer_replication": "layers are not replicated; train without layer_replication",
    "target_parameters": "single parameters are not adapted; choose linear modules with target_modules",
    "trainable_token_indices": "embeddings are not adapted; train without trainable_token_indices",
    "alora_invocation_tokens": "an adapter applies to all tokens; train without alora_invocation_tokens",
    "arrow_config": "adapters are not routed by token; use one adapter for each request",
    "use_qalora": "inputs are not pooled; train with use_qalora=False",
    "use_bdlora": "matrices have no diagonal blocks; train without use_bdlora",
}
"""Fields that have to be false or empty, with the reason and the remedy."""
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that change the base model too."""


@dataclass(frozen=True)
class AdapterConfig:
    """What the fields of the file say about the matrices of each module."""

    path: Path
    """The adapter's folder, for errors."""
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str | None
    """Ends of module names, or one regular expression for the whole names, or "all-linear"."""
    is_selective: bool
    """Whether further fields exclude modules that ``target_modules`` selects."""

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        """The configuration in an adapter's folder.

        Raises:
            CheckpointError: It is missing, damaged, or asks for what is not supported; names field and remedy.
        """
        values = _read_fields(path)
        _refuse_unsupported(path, values)
        selecting = ("layers_to_transform", "exclude_modules")
        targets = values.get("target_modules")
        return cls(
            path=path,
            rank=_positive(path, "r", values.get("r")),
            alpha=_number(path, "lora_alpha", values.get("lora_alpha")),
            is_rank_stabilized=bool(values.get("use_rslora")),
            rank_pattern={
                name: _positive(path, "rank_pattern", rank) for name, rank in _pattern(path, values, "rank_pattern")
            },
            alpha_pattern={
                name: _number(path, "alpha_pattern", alpha) for name, alpha in _pattern(path, values, "alpha_pattern")
            },
            target_modules=tuple(map(str, targets)) if isinstance(targets, list) else targets,
            is_selective=any(values.get(name) for name in selecting) or values.get(selecting[0]) == 0,
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of ``B A`` of a module: alpha / r, or alpha / sqrt(r) if it is rank-stabilized (rsLoRA)."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )

    def selects(self, module: str) -> bool:
        """Whether ``target_modules`` selects a linear module."""
        targets = self.target_modules
        if targets is None or targets == "all-linear":
            return targets is not None
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in targets)


def _read_fields(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: has no {CONFIG_FILE}; give the folder that peft's save_pretrained has written"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}. Save the adapter again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: is not an object. Save the adapter again")
    return values


def _refuse_unsupported(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {values.get('peft_type')!r}; only LORA is supported")
    for name, remedy in _REFUSED.items():
        if values.get(name):
            raise CheckpointError(f"{path}: {name}={values[name]!r} is not supported: {remedy}")
    if values.get("bias", "none") != "none":
        raise CheckpointError(f'{path}: bias={values["bias"]!r} is not supported; train with bias="none"')
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_THE_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights={start!r} changes the base model too; convert the adapter with "
            "path_initial_model_for_weight_conversion of peft's save_pretrained"
        )
    targets = values.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        try:
            re.compile(targets)
        except re.error as error:
            raise CheckpointError(
                f"{path}: target_modules={targets!r} is no regular expression: {error}. Correct it"
            ) from error
    elif targets is not None and not isinstance(targets, str | list):
        raise CheckpointError(f"{path}: target_modules={targets!r} must be a list or a text. Save the adapter again")


def _pattern(path: Path, values: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    pattern = values.get(field) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {field}={pattern!r} must be an object. Save the adapter again")
    for name in pattern:
        try:
            re.compile(name)
        except re.error as error:
            raise CheckpointError(f"{path}: {field} has {name!r}, no regular expression: {error}") from error
    return list(pattern.items())


def _positive(path: Path, field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {field}={value!r} must be a positive integer. Save the adapter again")
    return value


def _number(path: Path, field: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CheckpointError(f"{path}: {field}={value!r} must be a number. Save the adapter again")
    return float(value)


def _matching(pattern: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """The value of the first key that matches the end of a module's name, as in peft."""
    for name, value in pattern.items():
        if re.match(rf"(.*\.)?({name})$", module):
            return value
    return default

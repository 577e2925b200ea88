"""The ``quantization_config`` of compressed-tensors (Neural Magic, llm-compressor): a scheme for groups of modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.quantization.float8 import FLOAT8, float8_matrix
from megatron_runtime.model.formats.quantization.integers import integer_matrix, packed_matrix
from megatron_runtime.model.formats.quantization.stored_matrix import CONFIG, REMEDY, StoredMatrix, StoredModule

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "dense", "mixed-precision")
_BITS = {"float": (8,), "int": (4, 8)}
_ANY_ORDER = ("group", "dynamic")
"""Values of ``actorder``."""
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of a group of modules are quantized."""

    field: str
    """Its name in the configuration, for errors."""
    targets: tuple[str, ...]
    """Names of modules, ``re:`` and a regular expression for them, or classes such as ``Linear``."""
    bits: int
    symmetric: bool
    in_any_order: bool
    """Whether groups are of columns in any order, which ``weight_g_idx`` has."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: all, or a row, as the shape of the scales says."""


@dataclass(frozen=True)
class CompressedCheckpoint:
    """Modules that ``ignore`` lists are stored as plain numbers, which their stored types say."""

    schemes: Sequence[WeightScheme]
    endings = frozenset(
        {"weight", "weight_scale", "weight_zero_point", "weight_packed", "weight_g_idx", "weight_shape"}
    )

    def matrix(self, module: StoredModule) -> StoredMatrix | None:
        """As in Quantization."""
        if "weight" in module.tensors and module.tensors["weight"].kind not in (*FLOAT8, "I8"):
            return None
        scheme = self._scheme(module)
        by = f"{scheme.field}.{'block_structure' if scheme.block and scheme.block[0] > 1 else 'group_size'}"
        if scheme.in_any_order:
            module.tensor("weight_g_idx")  # without it, the weights would be wrong
        if "weight_packed" in module.tensors:
            return packed_matrix(module, scheme.bits, scheme.block, by, symmetric=scheme.symmetric)
        if module.tensor("weight").kind == "I8":
            return integer_matrix(module, scheme.block, by, symmetric=scheme.symmetric)
        return float8_matrix(module, scheme.block, by)

    def _scheme(self, module: StoredModule) -> WeightScheme:
        """That of a module: by its name, by an expression, or by its class, in this order."""
        ranked = [
            (rank, scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if (rank := _match(target, module.name)) is not None
        ]
        if not ranked:
            raise CheckpointError(
                f"{module.source.location}: {module.name} is quantized, but no group of {CONFIG}.config_groups has it "
                "among its targets. Fetch config.json again"
            )
        return min(ranked, key=lambda pair: pair[0])[1]


def _match(target: str, name: str) -> int | None:
    """How closely a target names a module: 0 is closest; None if it names others."""
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    if target == name:
        return 0
    return 2 if re.fullmatch("[A-Z][A-Za-z0-9_]*", target) else None  # a class: all matrices are those of Linear


def compressed_checkpoint(fields: ConfigFields) -> CompressedCheckpoint:
    """From the fields of ``quantization_config``. Raises CheckpointError if one is not supported."""
    _check_format(fields, f"{CONFIG}.format")
    for name in ("sparsity_config", "transform_config"):
        _check_extra(fields, f"{CONFIG}.{name}")
    groups = fields.get(f"{CONFIG}.config_groups", MISSING, dict)
    schemes = [
        scheme
        for name, group in groups.items()
        if (scheme := _scheme_of(fields.path, f"{CONFIG}.config_groups.{name}", group)) is not None
    ]
    return CompressedCheckpoint(schemes)


def _check_format(fields: ConfigFields, name: str) -> None:
    found = fields.get(name, "dense", str)
    if found not in _FORMATS:
        raise CheckpointError(f"{fields.path}: {name} is {found!r}, the known ones are {', '.join(_FORMATS)}. {REMEDY}")


def _check_extra(fields: ConfigFields, name: str) -> None:
    """Refuse sparse weights, and transformations of activations, which the decoder doesn't compute."""
    found = fields.get(name, {}, dict)
    if found.get("format", "dense") != "dense" or found.get("config_groups"):
        raise CheckpointError(f"{fields.path}: {name} is {found!r}, expected none. {REMEDY}")


def _scheme_of(path: Any, field: str, group: Any) -> WeightScheme | None:
    """That of one of the ``config_groups``; None if it has no weights."""
    within = ConfigFields(path, {field: group}).get(field, MISSING, dict)
    fields = ConfigFields(path, {f"{field}.{name}": value for name, value in within.items()})
    _check_format(fields, f"{field}.format")
    targets = _targets(fields, f"{field}.targets")
    if (weights := fields.get(f"{field}.weights", None, dict)) is None:
        return None
    field = f"{field}.weights"
    fields = ConfigFields(path, {f"{field}.{name}": value for name, value in weights.items()})
    kind, bits = fields.get(f"{field}.type", "int", str), fields.get(f"{field}.num_bits", 8, int)
    if bits not in _BITS.get(kind, ()):
        listed = ", ".join(f"{each} of {size} bits" for each, sizes in _BITS.items() for size in sizes)
        raise CheckpointError(
            f"{path}: {field}.type is {kind!r} with {field}.num_bits {bits}, the known ones are {listed}. {REMEDY}"
        )
    symmetric = fields.get(f"{field}.symmetric", True, bool)
    # Some files have true and false in place of names.
    in_any_order = weights.get("actorder") in (*_ANY_ORDER, True)
    return WeightScheme(field, targets, bits, symmetric, in_any_order, _block(fields, field))


def _targets(fields: ConfigFields, name: str) -> tuple[str, ...]:
    """Those of a group. Raises CheckpointError if one is no name and no regular expression."""
    targets = fields.numbers(name, str)
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(
                f"{fields.path}: {name} has {target!r}, which is no regular expression ({error}). Fetch the file again"
            ) from None
    return targets


def _block(fields: ConfigFields, field: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    group = fields.get(f"{field}.group_size", None, int)
    usual = "channel" if group in (None, -1) else "group"
    strategy = fields.get(f"{field}.strategy", usual, str)
    if strategy not in _STRATEGIES:
        raise CheckpointError(
            f"{fields.path}: {field}.strategy is {strategy!r}, the known ones are {', '.join(_STRATEGIES)}. {REMEDY}"
        )
    if strategy == "group":
        if group is None or group < 1:
            raise CheckpointError(
                f"{fields.path}: {field}.group_size is {group}, expected 1 or more. Fetch the file again"
            )
        return 1, group
    if strategy == "block":
        block = fields.numbers(f"{field}.block_structure", int)
        if len(block) != 2 or min(block) < 1:
            raise CheckpointError(
                f"{fields.path}: {field}.block_structure is {list(block)}, expected two numbers above 0. "
                "Fetch the file again"
            )
        return block[0], block[1]
    return None

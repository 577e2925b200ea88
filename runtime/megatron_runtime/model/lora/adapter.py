"""The tensors of an adapter: peft's ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.lora.adapter_config import CONFIG_FILE, AdapterConfig
from megatron_runtime.model.lora.targets import Place, TargetPart, Targets

TENSORS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA scales the merged matrix; train with use_dora=False",
    "lora_embedding_": "embeddings are not adapted; choose linear modules with target_modules",
    ".bias": 'biases are not adapted; train with bias="none" and lora_bias=False',
}


@dataclass(frozen=True)
class LowRankUpdate:
    """The update ``scale * up @ down`` of the part of a matrix that a rank has."""

    down: Tensor
    """[r, in], peft's A."""
    up: Tensor
    """[out, r], peft's B."""
    scale: float


@dataclass(frozen=True)
class Adapter:
    """One rank's part of an adapter."""

    updates: Mapping[Place, tuple[LowRankUpdate | None, ...]]
    """For each part of a matrix; None for one that the adapter does not change."""
    digest: str
    """SHA-256 of its files, in hexadecimal."""
    num_bytes: int
    """Of the updates on this rank."""


def read_adapter(path: Path, targets: Targets, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Read one rank's part of an adapter.

    Args:
        path: The folder that peft's ``save_pretrained`` has written.
        targets: The matrices of the rank.
        dtype: The type of the updates in memory.
        max_rank: Largest r of a matrix.

    Raises:
        CheckpointError: It can't be read, does not fit the model, or needs what is not supported; names the tensor or
            the field, and the remedy.
    """
    config = AdapterConfig.read(path)
    file = path / TENSORS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{path}: has no {TENSORS_FILE}; save the adapter with safe_serialization=True, since pickled files are "
            "not read"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            modules = _modules(path, tensors.keys(), targets)
            _check_modules(config, modules, targets)
            updates = {
                place: tuple(
                    _update(config, tensors, modules.get(part.module), part, dtype, max_rank) for part in parts
                )
                for place, parts in targets.parts.items()
            }
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged: {error}. Save the adapter again") from error
    changed = {place: parts for place, parts in updates.items() if any(part is not None for part in parts)}
    matrices = [m for parts in changed.values() for part in parts if part is not None for m in (part.down, part.up)]
    return Adapter(changed, _digest(path), sum(matrix.nbytes for matrix in matrices))


def _modules(path: Path, names: list[str], targets: Targets) -> dict[str, str]:
    """By module: the start of the names of its two tensors."""
    stored = set(names)
    found: dict[str, str] = {}
    for name in names:
        stem = name.removesuffix(_DOWN).removesuffix(_UP)
        if stem == name:
            reasons = (reason for part, reason in _OTHER_KINDS.items() if part in name)
            reason = next(reasons, "only lora_A and lora_B of linear modules are read; save the adapter with peft")
            raise CheckpointError(f"{path}: tensor {name} is not supported: {reason}")
        for end in (_DOWN, _UP):
            if stem + end not in stored:
                raise CheckpointError(f"{path}: tensor {stem}{end} is missing. Save the adapter again")
        found[targets.stored_name(stem.removeprefix(_PREFIX))] = stem
    if not found:
        raise CheckpointError(f"{path}: {TENSORS_FILE} has no tensors. Save the adapter again")
    return found


def _check_modules(config: AdapterConfig, modules: Mapping[str, str], targets: Targets) -> None:
    for module in modules:
        if module not in targets.shapes:
            possible = sorted({name.rsplit(".", 1)[-1] for name in targets.shapes})
            raise CheckpointError(
                f"{config.path}: target_modules: {module} can't be adapted: {targets.why_not(module)}. Adapters of "
                f"this model may have {', '.join(possible) or 'no module at all'}"
            )
    if config.is_selective:
        return
    for module in targets.shapes:
        if config.selects(module) and module not in modules:
            raise CheckpointError(
                f"{config.path}: target_modules={config.target_modules!r} selects {module}, but {TENSORS_FILE} has no "
                "tensors of it. Choose an adapter that was trained on this model"
            )


def _update(
    config: AdapterConfig, tensors: Any, stem: str | None, part: TargetPart, dtype: torch.dtype, max_rank: int
) -> LowRankUpdate | None:
    if stem is None:
        return None
    module = stem.removeprefix(_PREFIX)
    rank = config.rank_of(module)
    if rank > max_rank:
        raise CheckpointError(f"{config.path}: r={rank} of {module} is more than --max-lora-rank {max_rank}; raise it")
    height, width = part.shape
    matrices: list[Tensor] = []
    for name, shape in ((stem + _DOWN, (rank, width)), (stem + _UP, (height, rank))):
        stored = tuple(tensors.get_slice(name).get_shape())
        if stored != shape:
            raise CheckpointError(
                f"{config.path}: tensor {name} has the shape {list(stored)}, expected {list(shape)} with r={rank} on "
                "this model. Choose an adapter that was trained on this model"
            )
        matrix = tensors.get_tensor(name).to(dtype)
        if not bool(matrix.isfinite().all()):
            type_name = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{config.path}: tensor {name} has NaN or infinity as {type_name}. Choose another one"
            )
        matrices.append(matrix)
    down, up = matrices
    columns = down[:, part.columns.start : part.columns.stop].contiguous()
    return LowRankUpdate(columns, part.own_rows(up).contiguous(), config.scale_of(module))


def _digest(path: Path) -> str:
    whole = hashlib.sha256((path / CONFIG_FILE).read_bytes())
    with (path / TENSORS_FILE).open("rb") as file:
        whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()

"""LoRA adapters with random weights, in the files of peft, and the model with their weights merged."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runtime_support.memory_shortages import ALLOCATOR, Shortage
from safetensors.torch import load_file, save_file

from megatron_runtime.model.lora.adapted_linear import UpdateTable

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Any, *, targets: Sequence[str] = LINEAR, **fields: Any) -> Path:
    """Write an adapter of the linear modules of a model of transformers whose names end with one of ``targets``.

    ``fields`` are the other arguments of `write_adapter_of`.
    """
    shapes = {
        name: tuple(_weight(module).shape)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in targets and hasattr(module, "weight")
    }
    return write_adapter_of(folder, shapes, targets=targets, **fields)


def write_adapter_of(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    targets: Sequence[str],
    rank: int = 3,
    alpha: float = 5.0,
    seed: int = 0,
    std: float = 0.2,
    **fields: Any,
) -> Path:
    """Write an adapter of modules whose weights have these shapes; ``fields`` are other fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (out, *width) in shapes.items():
        own = next((value for key, value in config.get("rank_pattern", {}).items() if re.search(f"{key}$", name)), rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(own, *width, generator=noise) * std
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, own, generator=noise) * std
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """A copy of the model whose weights are W + scale * B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        prefix = f"base_model.model.{name}"
        if (down := tensors.get(f"{prefix}.lora_A.weight")) is None:
            continue
        alphas = (value for key, value in config.get("alpha_pattern", {}).items() if re.search(f"{key}$", name))
        divisor = len(down) ** 0.5 if config.get("use_rslora") else len(down)
        scale = next(alphas, config["lora_alpha"]) / divisor
        _weight(module).add_(scale * tensors[f"{prefix}.lora_B.weight"] @ down)
    return twin


def _weight(module: Any) -> torch.Tensor:
    """[out, in]; the Conv1D of GPT-2 has its matrix transposed."""
    weight: torch.Tensor = module.weight.data
    return weight.t() if type(module).__name__ == "Conv1D" else weight


@contextmanager
def without_memory(*, at_call: int, shortage: Shortage = ALLOCATOR) -> Iterator[None]:
    """In this context the device has no memory when the updates of a module are replaced for the ``at_call``th time."""
    calls, replace = count(1), UpdateTable.replace

    def replaced(table: UpdateTable, updates: Any) -> None:
        if next(calls) == at_call:
            shortage.fail()
        replace(table, updates)

    with patch.object(UpdateTable, "replace", replaced):
        yield

"""The ranks' functions in the tests of models that several ranks divide."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runtime_support.group_scenarios import join
from runtime_support.paged_requests import PagedRequests
from runtime_support.resident_memory import peak_growth

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.adapters import load_adapter
from megatron_runtime.model.checkpoint import load_model
from megatron_runtime.model.refit import offload_weights, restore_weights, update_weights
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks

PROMPTS = {"long": list(range(3, 26)), "short": [7, 5, 3]}


@dataclass(frozen=True)
class Answers:
    """A model's answers to PROMPTS."""

    logits: torch.Tensor | None
    """Of every token, prefilled in two chunks; None on ranks that don't sample."""
    tokens: dict[str, list[int]]
    """The continuation of each prompt."""


def answer(path: Path, ranks: Ranks | None = None, steps: int = 64) -> Answers:
    """Runs the model at ``path``, or this rank's part together with the other ranks."""
    return _ask(load_model(path, dtype="float32", ranks=ranks), steps)


def _ask(decoder: Any, steps: int) -> Answers:
    requests = PagedRequests(decoder, num_blocks=64, block_size_tokens=4)
    parts = [requests.logits({name: tokens[a:b] for name, tokens in PROMPTS.items()}) for a, b in ((0, 2), (2, None))]
    logits = None if parts[0] is None else torch.cat([part for part in parts if part is not None])
    return Answers(logits, PagedRequests(decoder, num_blocks=64, block_size_tokens=4).continue_greedily(PROMPTS, steps))


def answer_all(rank: int, sizes: ParallelSizes, port: int, models: list[tuple[Path, int]]) -> list[Answers]:
    """One model after the other, each for some steps, on the same ranks."""
    ranks = join(sizes, rank, port)
    answers = [answer(path, ranks, steps) for path, steps in models]
    ranks.close()
    return answers


def answer_quantized(rank: int, sizes: ParallelSizes, port: int, path: Path) -> dict[str, Any]:
    """The answers of this rank's part with quantized weights, and the same in other passes and after a suspension."""
    ranks = join(sizes, rank, port)
    model = load_model(path, dtype="float32", quantized_weights="keep", ranks=ranks)
    named = {name: view.clone() for name, view in model.destinations().items()}
    said: dict[str, Any] = {"weights": named, "quantized": model.layers[0].feed_forward.down.__class__.__name__}
    said["answers"] = _ask(model, 8)
    requests = PagedRequests(model, num_blocks=64, block_size_tokens=4)
    said["one by one"] = [requests.logits({name: [token]}) for name, tokens in PROMPTS.items() for token in tokens]
    requests = PagedRequests(model, num_blocks=64, block_size_tokens=4)
    said["whole"] = [requests.logits({name: tokens}) for name, tokens in PROMPTS.items()]
    offload_weights(model)
    restore_weights(model, torch.device("cpu"))
    said["brought back"] = _ask(model, 8)
    ranks.close()
    return said


def choose_experts(rank: int, sizes: ParallelSizes, port: int, path: Path) -> dict[str, Any]:
    """The experts that a rank selects for tokens whose attention it has computed differently."""
    ranks = join(sizes, rank, port)
    layer = load_model(path, dtype="float32", ranks=ranks).layers[-1].feed_forward
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(rank // sizes.tensor))
    alone, together = layer.router(hidden), layer._route(hidden)
    ranks.close()
    return {"alone": alone._asdict(), "together": together._asdict()}


def renew(rank: int, sizes: ParallelSizes, port: int, old: Path, new: Path, broken: Path) -> dict[str, Any]:
    """Weight updates in a divided model, from files and by name; weights that are invalid on one rank; and released
    ones.
    """
    ranks = join(sizes, rank, port)
    model = load_model(old, dtype="float32", ranks=ranks)
    said: dict[str, Any] = {"shapes": {name: tuple(view.shape) for name, view in model.destinations().items()}}
    update_weights(model, new)
    said["from files"] = _ask(model, 4)
    try:
        update_weights(model, broken)
    except CheckpointError as error:
        said["complaint"] = str(error)
    said["after a complaint"] = _ask(model, 4)
    update_weights(model, load_model(old, dtype="float32").destinations())
    said["by name"] = _ask(model, 4)
    update_weights(model, new)
    offload_weights(model)
    said["released"] = {parameter.device.type for parameter in model.parameters()}
    restore_weights(model, torch.device("cpu"))
    said["brought back"] = _ask(model, 4)
    ranks.close()
    return said


def measure_load(rank: int, sizes: ParallelSizes, port: int, small: Path, large: Path) -> dict[str, int]:
    """The growth of a rank's memory in bytes while it loads its part, and the bytes of that part."""
    ranks = join(sizes, rank, port)
    load_model(small, dtype="float32", ranks=ranks)  # imports and one-time allocations
    model, peak = peak_growth(lambda: load_model(large, dtype="float32", ranks=ranks))
    weights = sum(view.nbytes for view in model.destinations().values())
    ranks.close()
    return {"peak": peak, "weights": weights}


def adapt(
    rank: int, sizes: ParallelSizes, port: int, path: Path, folders: list[Path], tokens: list[int]
) -> dict[str, Any]:
    """The logits of each adapter and without one, in one pass; and the error of one that is damaged on a rank."""
    ranks = join(sizes, rank, port)
    model = load_model(path, dtype="float32", ranks=ranks)
    for slot, folder in enumerate(folders):
        load_adapter(model, slot, folder, max_rank=64)
    requests = PagedRequests(model, num_blocks=64, block_size_tokens=4)
    requests.adapters = {str(slot): slot for slot in range(len(folders))}
    logits = requests.logits(dict.fromkeys((*requests.adapters, "without"), tokens))
    ranks.barrier("the passes are done")
    said: dict[str, Any] = {"logits": logits}
    own = folders[0].parent / f"of rank {rank}"
    shutil.copytree(folders[0], own)
    if rank == 0:
        (own / "adapter_model.safetensors").write_bytes(b"damaged")
    try:
        load_adapter(model, len(folders), own, max_rank=64)
    except CheckpointError as error:
        said["complaint"] = str(error)
    ranks.close()
    return said

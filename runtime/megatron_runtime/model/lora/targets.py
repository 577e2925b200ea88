"""The matrices of a decoder that adapters change, under the names of their modules in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder_layer import make_layer
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.gated_delta_net import GatedDeltaNet
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.mamba import Mamba2
from megatron_runtime.model.placements import Placement, layer_placements
from megatron_runtime.model.self_attention import SelfAttention
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.single_rank import SingleRank

_EXPERTS = (".mlp.", ".feed_forward.", ".block_sparse_moe.", ".mixer.experts.", ".mixer.shared_experts.", ".mixer.gate")
"""What the names of the modules of experts contain, in a checkpoint or in transformers."""
_RENAMED = (
    ("model.language_model.", "language_model.model."),
    ("model.layers.", "model.language_model.layers."),
    ("model.", "backbone."),
)
"""The start of module names in transformers, where that of the names in a checkpoint is another one: in the class of
the multimodal model, in that of its text model, or in the only class.
"""
Place = tuple[int, str]
"""The number of a layer, and the path of a linear module in it."""


@dataclass(frozen=True)
class TargetPart:
    """The part of a matrix that comes from one module of a checkpoint."""

    module: str
    """Its name."""
    shape: tuple[int, int]
    """[out, in] of the whole module."""
    rows: tuple[range, ...]
    """Of the outputs, those on this rank."""
    columns: range
    """Of the inputs, those on this rank."""

    @property
    def height(self) -> int:
        """Number of outputs on this rank."""
        return sum(map(len, self.rows))

    def own_rows(self, up: Tensor) -> Tensor:
        """The rows of a matrix [out, r] for the outputs on this rank."""
        return torch.cat([up[chunk.start : chunk.stop] for chunk in self.rows])


@dataclass(frozen=True)
class Targets:
    """The matrices of one rank that adapters change, and the modules of the whole model that they may name."""

    parts: Mapping[Place, tuple[TargetPart, ...]]
    """In the order of the outputs."""
    shapes: Mapping[str, tuple[int, int]]
    """[out, in] of every module of the model, on any rank."""
    config: ModelConfig

    @classmethod
    def of(cls, shard: Shard) -> Targets:
        """The matrices of a rank's part of a model."""
        names = tensor_names(shard.config.architecture)
        whole = Shard(shard.config)
        shapes: dict[str, tuple[int, int]] = {}
        parts: dict[Place, tuple[TargetPart, ...]] = {}
        for number in whole.layers:
            found = _modules(number, whole, names)
            shapes |= {module: _shape(place, names) for modules in found.values() for module, place in modules}
            if number not in shard.layers:
                continue
            for path, modules in _modules(number, shard, names).items():
                parts[number, path] = tuple(_part(module, place, names, shapes[module]) for module, place in modules)
        return cls(parts, shapes, shard.config)

    def stored_name(self, module: str) -> str:
        """The name in a checkpoint of a module that an adapter names; unchanged if it has the name of a checkpoint."""
        layers = tensor_names(self.config.architecture).layer
        for start, stored in _RENAMED:
            if layers.startswith(stored) and module.startswith(start):
                return stored + module.removeprefix(start)
        return module

    def why_not(self, module: str) -> str:
        """Why adapters can't change a module that is not among the targets."""
        names = tensor_names(self.config.architecture)
        if self.config.experts is not None and any(name in module for name in _EXPERTS):
            return "adapters of experts and their routers are not supported"
        latent = (names.query_down, names.query_up, names.kv_down, names.kv_up, *names.qkv, names.attention_output)
        if self.config.latent_attention is not None and module.endswith(latent):
            return "adapters of multi-head latent attention are not supported"
        if self.config.recurrent is not None and module.endswith(names.convolution):
            return "adapters of convolutions are not supported"
        if module in (names.head, names.embedding):
            return "adapters of the embedding and of the head are not supported"
        return "the model has no such module"


def _modules(number: int, shard: Shard, names: TensorNames) -> dict[str, list[tuple[str, Placement]]]:
    """By path in the layer: the modules of a checkpoint that make up a matrix, and their places in it."""
    with torch.device("meta"):
        layer = make_layer(shard, number, torch.float32, SingleRank())
    places = dict(layer_placements(layer, names, shard))
    prefix = names.layer.format(number)
    return {
        f"{path}.{attribute}": [(prefix + name, places[f"{name}.weight"]) for name in stored]
        for path, owner in layer.named_children()
        for attribute, stored in _matrices(owner, names).items()
    }


def _matrices(owner: nn.Module, names: TensorNames) -> dict[str, Sequence[str]]:
    """By attribute of a part of a layer: the modules of a checkpoint whose rows make up the matrix, in this order."""
    if isinstance(owner, SelfAttention):
        return {"qkv": names.qkv, "output": (names.attention_output,)}
    if isinstance(owner, FeedForward):
        return {"gate_up": names.gate_up, "down": (names.down,)}
    if isinstance(owner, GatedDeltaNet | Mamba2):
        gates = {"gates": names.recurrent_gates} if isinstance(owner, GatedDeltaNet) else {}
        return {"inputs": names.recurrent_inputs, **gates, "output": (names.recurrent_output,)}
    return {}


def _shape(place: Placement, names: TensorNames) -> tuple[int, int]:
    height, width = place.view.t().shape if names.transposed else place.view.shape
    return height, width


def _part(module: str, place: Placement, names: TensorNames, whole: tuple[int, int]) -> TargetPart:
    divides_columns = place.dim == (0 if names.transposed else 1)
    if divides_columns:
        (columns,) = place.stored
        return TargetPart(module, whole, (range(whole[0]),), columns)
    return TargetPart(module, whole, place.stored, range(whole[1]))

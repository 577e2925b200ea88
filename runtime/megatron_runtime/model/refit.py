"""Replaces the weights of a decoder in use, and releases their memory during a suspension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import check_fit, fill, open_checkpoint
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.device_memory import GENERAL_REMEDY, address_obstacle, naming_device_memory
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path
from megatron_runtime.model.formats.origin import Origin
from megatron_runtime.model.formats.safetensors_checkpoint import SafetensorsWeights
from megatron_runtime.model.formats.stacked_experts import single_experts
from megatron_runtime.model.formats.tensor_names import name_of_tied_head
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource
from megatron_runtime.model.megatron import from_live_model, is_megatron_state

Weights = Path | str | Mapping[str, Tensor] | nn.Module
"""The path of a checkpoint or of one safetensors file (which may be in shared memory), or all tensors of a model by
their Hugging Face names, or a live GPTModel of Megatron Core, or its named tensors.
"""
_TENSORS_SUFFIX = ".safetensors"


class NamedTensors:
    """Tensors in memory as a source of weights. A copy of a head that is tied to the embedding may be among them."""

    reads_in_threads = False

    def __init__(self, given: Mapping[str, Tensor], config: ModelConfig) -> None:
        copy = name_of_tied_head(config)
        self._given = {name: tensor.detach() for name, tensor in given.items() if name != copy}

    @property
    def location(self) -> str:
        """For errors."""
        return "the named tensors"

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Their shapes."""
        return {
            name: StoredTensor(tuple(tensor.shape), tensor.numel() * tensor.element_size(), str(tensor.dtype))
            for name, tensor in self._given.items()
        }

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Copy a part of one, converting its type."""
        within = tuple(slice(begin, begin + size) for begin, size in zip(start, into.shape, strict=True))
        into.copy_(self._given[name][within])
        yield into.numel()


READ_TIMEOUT = 1800.0
"""Seconds that one rank may take longer to read its part than another."""


def update_weights(model: Decoder, weights: Weights) -> None:
    """Replace the weights of a decoder by those of another checkpoint of the same architecture; on an error none
    changes.

    They are read and checked in host memory beside the present ones, which needs room for both during the update. If
    those are on a GPU, or have places there, the new weights are then copied over them. All ranks of a replica group
    call this, with the same weights; each reads its part, and an error on one rank is an error on all.

    The tensors of a live GPTModel are not copied if they have the decoder's type and device: the decoder shares them.

    Raises:
        CheckpointError: The weights can't be read, have another configuration, missing, unknown or misshapen tensors,
            or NaN or infinity; it names them.
    """
    if isinstance(weights, nn.Module) or (isinstance(weights, Mapping) and is_megatron_state(weights)):
        if model.adapters:
            raise CheckpointError("adapters are not supported on the weights of a live model; unload them first")
        model.replace_with(from_live_model(model, weights))
        return
    fresh = _read(model, weights)
    if model.device.type in ("cpu", "meta") and model.places is None:
        if model.is_packed or model.device.type == "meta":
            fresh.prepare()
        model.replace_with(fresh.eval())
    else:
        _check_memory(model, fresh)
        model.copy_from(fresh)


def _check_memory(model: Decoder, fresh: Decoder) -> None:
    """Raise CheckpointError unless the weights fit the memory of those on the GPU, which stays where it is."""
    ours, theirs = (
        {name: (each.shape, each.dtype) for name, each in decoder.named_parameters()} for decoder in (model, fresh)
    )
    if ours != theirs:
        raise CheckpointError(
            "the matrices that stay in fp8 on the GPU are others than those of the new weights, or have scales for "
            "other columns. Give a checkpoint that is quantized in the same way, or use --quantized-weights expand"
        )


def keep_places(model: Decoder, device: torch.device) -> None:
    """Let the weights return to the same addresses of a GPU when `restore_weights` undoes `offload_weights`.

    They move once, now. Nothing happens where `address_obstacle` has a reason, and to weights of a live model, which
    belong to their owner.

    Raises:
        ConfigurationError: The GPU has too little memory to move them.
        EngineError: The driver refuses.
    """
    if model.is_shared or model.places is not None or address_obstacle(device) is not None:
        return
    from megatron_runtime.model.weight_places import WeightPlaces  # Not needed on other devices.

    find_weights_again(model)
    stage = "while it moved the weights to addresses that a suspension keeps"
    with naming_device_memory(stage, device, remedy=f"leave out --offload-weights, or {GENERAL_REMEDY}"):
        model.places = WeightPlaces(model, device)


def find_weights_again(model: Decoder) -> None:
    """To be called when the weights move other than by methods of a Module."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.find_weights_again()


def offload_weights(model: Decoder) -> None:
    """Release the weights' memory on the device. Weights of a live model are kept, because their owner may use them.

    On a GPU the weights move to the host. On a CPU they are released, to be read again from the checkpoint's files;
    weights that came as named tensors, without a file, are kept.
    """
    if model.is_shared:
        return
    if model.places is not None:
        model.places.release()
    elif model.device.type != "cpu":
        model.to("cpu")
    elif model.origin is not None:
        released = Decoder(model.config, dtype=model.dtype, device="meta", ranks=model.ranks)
        released.origin, released.positions = model.origin, model.positions
        model.replace_with(released)


def restore_weights(model: Decoder, device: torch.device) -> None:
    """Undo `offload_weights`.

    Raises:
        CheckpointError: The files of released weights have changed, or can't be read.
        torch.OutOfMemoryError: The GPU has too little memory.
    """
    if model.places is not None:
        model.places.restore()
        return
    if model.device.type != "meta":
        model.to(device)
        return
    assert model.origin is not None
    if not model.origin.is_unchanged():
        raise CheckpointError(
            f"{model.origin.path}: changed since its weights were released. Load the new files with update_weights"
        )
    update_weights(model, model.origin.path)


def _read(model: Decoder, weights: Path | str | Mapping[str, Tensor]) -> Decoder:
    fresh: Decoder | None = None
    failure: Exception | None = None
    try:
        fresh = _read_here(model, weights)
    except Exception as error:  # Any error, so that the other ranks do not apply weights that this rank can't.
        failure = error
    own = None if failure is None else str(failure)
    shared = model.ranks.first_error(own, READ_TIMEOUT)
    if failure is not None:
        raise failure
    if shared is not None or fresh is None:
        raise CheckpointError(f"on another rank: {shared}")
    return fresh


def _read_here(model: Decoder, weights: Path | str | Mapping[str, Tensor]) -> Decoder:
    if isinstance(weights, Mapping):
        return _read_tensors(model, NamedTensors(weights, model.config))
    path = Path(weights)
    if path.suffix == _TENSORS_SUFFIX and path.is_file():
        return _read_tensors(model, SafetensorsWeights(path, model.config))
    return _read_checkpoint(model, path)


def _read_checkpoint(model: Decoder, given: Path) -> Decoder:
    path = checkpoint_path(given)
    origin = Origin.of(path)
    config, source, rotary_factors = open_checkpoint(path)
    limit = model.config.max_position_embeddings
    if config.max_position_embeddings > limit:
        config = replace(config, max_position_embeddings=limit)
    for field in fields(ModelConfig):
        ours, theirs = getattr(model.config, field.name), getattr(config, field.name)
        if ours != theirs:
            raise CheckpointError(
                f"{path}: {field.name} is {theirs!r}, but {ours!r} in the model that is served. "
                "Choose a checkpoint of the same model, or start again with this one"
            )
    check_fit(config, source)
    fresh = Decoder(config, dtype=model.dtype, device="cpu", ranks=model.ranks)
    fresh.kept_kind = model.kept_kind
    fill(fresh, source, rotary_factors, check_finite=True)
    fresh.origin = origin
    return fresh


def _read_tensors(model: Decoder, source: WeightSource) -> Decoder:
    """Without an origin: a file of tensors alone is written for one update, and may be deleted afterwards."""
    source = single_experts(source, model.config)
    check_fit(model.config, source)
    fresh = Decoder(model.config, dtype=model.dtype, device="cpu", ranks=model.ranks)
    fill(fresh, source, None, check_finite=True)
    # Position tables beyond the configuration have no tensor name.
    fresh.positions = model.positions
    return fresh

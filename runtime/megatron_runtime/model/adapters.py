"""Loads LoRA adapters into a decoder in use."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.device_memory import describe_shortage, is_device_shortage
from megatron_runtime.model.lora.adapter import Adapter
from megatron_runtime.model.refit import READ_TIMEOUT


def load_adapter(
    model: Decoder, slot: int, path: Path, *, max_rank: int, device: torch.device | None = None
) -> Adapter:
    """Load an adapter into a free slot; the rows of a batch name it by the slot. On an error nothing changes.

    All ranks of a replica group call this, with the same files; each reads its part, and an error on one rank is an
    error on all.

    Args:
        model: The decoder, or the part of it on this rank.
        slot: The slot.
        path: The folder that peft's ``save_pretrained`` has written.
        max_rank: Largest r of a matrix.
        device: The device that computes, for a decoder whose weights may be released; None: that of the weights.

    Raises:
        CheckpointError: It can't be read, does not fit the model or the memory, or needs what is not supported.
    """
    adapter: Adapter | None = None
    failure: Exception | None = None
    slots = model.use_adapters(device)
    try:
        adapter = slots.read(path, max_rank)
        slots.put(slot, adapter)
    except Exception as error:  # Any error, so that the other ranks do not use an adapter that this rank can't.
        failure = error
        if is_device_shortage(error):
            shortage = describe_shortage("while it loaded an adapter", device or model.device, error)
            failure = CheckpointError(
                f"{path}: {shortage}; lower --kv-cache-memory, or load fewer adapters or some of a lower rank"
            )
    shared = model.ranks.first_error(None if failure is None else str(failure) or repr(failure), READ_TIMEOUT)
    if failure is not None:
        raise failure if isinstance(failure, CheckpointError) else CheckpointError(f"{path}: {failure}") from failure
    assert adapter is not None, "there was no error"
    if shared is not None:
        slots.free(slot)
        raise CheckpointError(f"on another rank: {shared}")
    return adapter

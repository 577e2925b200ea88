"""The layers of a decoder on a CPU, as calls of kernels that are recorded once for a number of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.activations import MOST_RECORDED_ROWS
from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.decoder_layer import DecoderLayer, NumberedLayer
from megatron_runtime.model.kernels.cpu_attention import AttentionInputs, CpuAttention
from megatron_runtime.model.kernels.recording import LayerMemory, NotRecordableError, Recording
from megatron_runtime.model.kernels.threads import kernel_threads
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.self_attention import SelfAttention

logger = logging.getLogger(__name__)

EXACT_ROWS = 128
"""Larger passes have a part of a prompt, whose number of tokens seldom repeats."""
STEP = 8
"""Such passes get further rows up to a multiple of this, which cost less than the time between kernels."""
MOST_KINDS = 512
"""Of passes, before all recordings are dropped: old ones may be of a cache that no longer exists."""


@dataclass(frozen=True)
class _Kind:
    """What the arguments of recorded calls depend on."""

    rows: int
    """With those that `padded_rows` adds."""
    threads: int
    cache: tuple[object, ...]
    """`KVCache.identity`."""


@dataclass(frozen=True)
class _Recorded:
    recording: Recording
    hidden: Tensor
    """The input of the first layer, [rows, hidden]."""
    normed: Tensor
    """The norm of the last layer's output, [rows, hidden]."""


def padded_rows(rows: int) -> int:
    """The rows of the recording for a pass of ``rows``. The further ones begin as zeros; attention leaves them out."""
    return rows if rows <= EXACT_ROWS else -(-rows // STEP) * STEP


class RecordedLayers:
    """Records a pass when passes of its kind are computed for the second time, and repeats the recording for others.

    The results have the bits of the layers, because the same kernels are called.
    """

    def __init__(self, layers: Sequence[NumberedLayer]) -> None:
        self._layers = layers
        self._is_recordable = all(_is_recordable(each) for each in layers)
        self.num_repeated = 0
        """Number of passes that were repeated recordings."""
        self._recorded: dict[_Kind, _Recorded | None] = {}
        """None for a kind that was there once."""
        self._memory: dict[tuple[object, ...], LayerMemory] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings."""
        return sum(each.num_bytes for each in self._memory.values())

    def run(
        self, hidden: Tensor, positions: Sequence[LayerPositions], plan: AttentionPlan, cache: KVCache
    ) -> Tensor | None:
        """The norm of the last layer's output, [T, hidden], until the next call; None if the layers have to be called.

        Args:
            hidden: The input of the first layer, [T, hidden].
            positions: By layer.
            plan: The attention of the pass, whose rows have no adapters.
            cache: That of the plan.
        """
        rows = hidden.shape[0]
        if not isinstance(plan, CpuAttention) or not self._may_record(rows):
            return None
        kind = _Kind(padded_rows(rows), kernel_threads(), cache.identity)
        known = self._recorded  # Another engine with this decoder may drop them meanwhile.
        if kind not in known:
            self._note(kind)
            return None
        if (found := known[kind]) is None:
            return self._record(kind, hidden, positions, plan, cache)
        _copy(hidden, found.hidden)
        found.recording.repeat({each: _inputs(each, positions, plan) for each in found.recording.sources})
        self.num_repeated += 1
        return found.normed[:rows]

    def _note(self, kind: _Kind) -> None:
        if len(self._recorded) == MOST_KINDS:
            self._recorded, self._memory = {}, {}
        self._recorded[kind] = None

    def _may_record(self, rows: int) -> bool:
        # A profiler of PyTorch does not see calls of kernels.
        is_profiled: bool = torch._C._autograd._profiler_enabled()
        return self._is_recordable and 0 < rows <= MOST_RECORDED_ROWS and not is_profiled

    def _record(
        self, kind: _Kind, given: Tensor, positions: Sequence[LayerPositions], plan: CpuAttention, cache: KVCache
    ) -> Tensor | None:
        most_rows = 1 << (kind.rows - 1).bit_length()
        memory = self._memory.setdefault((kind.cache, most_rows), LayerMemory(most_rows))
        recording = Recording(kind.rows, memory)
        first = recording.tensor((kind.rows, given.shape[1]), given.dtype)
        _copy(given, first)
        try:
            with recording.active():
                hidden = first
                normed: Tensor = self._layers[0].layer.input_norm(first)
                for index, (number, layer, next_norm) in enumerate(self._layers):
                    recording.begin_layer(number)
                    hidden, normed = layer(hidden, normed, positions[number], plan, cache.layer(index), next_norm)
        except NotRecordableError as error:
            logger.debug("passes of this model are not recorded: %s", error)
            self._is_recordable = False
            return None
        self._recorded[kind] = _Recorded(recording, first, normed)
        return normed[: len(given)]


def _is_recordable(numbered: NumberedLayer) -> bool:
    """Whether all that a layer computes is known to the recording: kernels and operators of PyTorch."""
    layer = numbered.layer
    is_dense = isinstance(layer, DecoderLayer) and isinstance(layer.feed_forward, FeedForward)
    return is_dense and isinstance(layer.attention, SelfAttention)


def _copy(given: Tensor, into: Tensor) -> None:
    into[: len(given)].copy_(given)
    into[len(given) :].zero_()


def _inputs(source: object, positions: Sequence[LayerPositions], plan: CpuAttention) -> tuple[NDArray[Any], ...]:
    assert isinstance(source, AttentionInputs)
    return plan.inputs(positions[source.layer].rotation, *source[1:])

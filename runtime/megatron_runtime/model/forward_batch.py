"""The input of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AdapterRows:
    """The adapters of the rows of a pass."""

    slots: NDArray[np.int32]
    """[T], the slot of each row's adapter; -1 for none."""

    groups_on_device: Mapping[int, Tensor] | None = None
    """The `groups` of a GPU."""

    @cached_property
    def groups(self) -> Mapping[int, Tensor]:
        """Every slot in use, with its rows: int64 [rows of the slot], on the device. The kernel of CPUs has no need of
        them, so that they are found on request there.
        """
        if self.groups_on_device is not None:
            return self.groups_on_device
        return {slot: torch.from_numpy(rows) for slot, rows in rows_of_adapters(self.slots).items()}


def rows_of_adapters(slots: NDArray[np.int32]) -> dict[int, NDArray[np.int64]]:
    """The `AdapterRows.groups` of these slots, on the host."""
    return {slot: np.flatnonzero(slots == slot) for slot in np.unique(slots[slots >= 0]).tolist()}


class HostTables(NamedTuple):
    """The tables of a ForwardBatch on the host, each int32."""

    query_starts: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    block_tables: NDArray[np.int32]


@dataclass(frozen=True)
class ForwardBatch:
    """A flat batch of T new tokens from R requests, prefill and decode mixed, without padding.

    Request ``r`` owns the rows ``query_starts[r]:query_starts[r + 1]``. Its keys and values are in the blocks
    ``block_tables[r]``; after this pass ``context_lengths[r]`` of their tokens are valid, the new ones last.
    """

    tokens: Tensor
    """int64 [T], token ids."""
    positions: Tensor
    """int64 [T], position of each token in its sequence."""
    slots: Tensor
    """int64 [T], ``block * block_size_tokens + offset``: the slot of each new token's key and value."""
    query_starts: Tensor
    """int32 [R + 1], prefix sums of the new tokens per request."""
    context_lengths: Tensor
    """int32 [R], tokens in the cache per request after this pass."""
    block_tables: Tensor
    """int32 [R, max blocks], rows padded with 0 past ``ceil(context_lengths / block_size_tokens)``."""
    logit_rows: Tensor | None
    """int64 [L], the rows of the batch whose logits are requested, ascending; None: all."""
    adapters: AdapterRows | None = None
    """The adapters of the rows; None if no row has one."""
    state_slots: Tensor | None = None
    """int64 [R], the slot of each request's recurrent states, all different; None in a model without them."""
    host_tables: HostTables | None = None
    """For attention that the host plans; None: it has to copy them from the device."""

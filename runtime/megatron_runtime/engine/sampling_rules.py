"""How the rows of a batch are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.guide_mask import GuideMask
from megatron_runtime.engine.logit_edits import LogitEdits


@dataclass(frozen=True)
class SamplingRules:
    """How each of S rows is sampled."""

    temperature: NDArray[np.float32]
    """[S]; 0 takes the likeliest token."""
    top_k: NDArray[np.int32]
    """[S]; 0 means all."""
    top_p: NDArray[np.float32]
    """[S]; 0 and 1 mean all."""
    min_p: NDArray[np.float32]
    """[S]; 0 means all."""
    keys: NDArray[np.uint64]
    """[S], as from noise_keys."""
    edits: LogitEdits | None = None
    """What to change in the logits before anything else."""
    mask: GuideMask | None = None
    """What grammars rule out, whatever the edits say."""

    @property
    def changes_logits(self) -> bool:
        """Whether ``edit_`` changes anything."""
        return self.edits is not None or self.mask is not None

    def edit_(self, logits: Tensor) -> None:
        """Do edits and mask in the logits, [S, vocab], in place."""
        if self.edits is not None:
            self.edits.apply_(logits)
        if self.mask is not None:
            self.mask.apply_(logits)

    @property
    def is_noisy(self) -> NDArray[np.bool_]:
        """[S], where it is not always the likeliest token that is taken."""
        noisy: NDArray[np.bool_] = (self.temperature > 0) & (self.top_k != 1)
        return noisy

    @property
    def has_nucleus(self) -> NDArray[np.bool_]:
        """[S], where top-p rules something out."""
        nucleus: NDArray[np.bool_] = (self.top_p > 0) & (self.top_p < 1)
        return nucleus

    @property
    def is_limited(self) -> NDArray[np.bool_]:
        """[S], where any filter rules something out."""
        limited: NDArray[np.bool_] = (self.top_k > 0) | self.has_nucleus | (self.min_p > 0)
        return limited

    @property
    def needs_candidates(self) -> NDArray[np.bool_]:
        """[S], where it takes several logits to say which of them are ruled out; min-p is known beforehand."""
        needed: NDArray[np.bool_] = (self.top_k > 0) | self.has_nucleus
        return needed

    def take(self, rows: NDArray[np.intp]) -> SamplingRules:
        """The rules of some rows, without their edits."""
        return SamplingRules(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )

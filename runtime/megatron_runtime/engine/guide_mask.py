"""What the grammars of a batch's requests allow, over its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class GuideMask:
    """What the guided rows of a batch may choose from."""

    rows: NDArray[np.int64]
    """[G], rows of the logits."""
    allowed: NDArray[np.bool_]
    """[G, vocab]."""

    def apply_(self, logits: Tensor) -> None:
        """Rule out everything else in the logits, [S, vocab], in place."""
        rows = torch.from_numpy(self.rows).to(logits.device)
        forbidden = torch.from_numpy(~self.allowed).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

"""The process groups of torch.distributed that a rank belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a rank, and the position of its replica group in torch's world."""

    control: dist.ProcessGroup
    """All ranks of the replica group, over gloo."""
    pipeline: dist.ProcessGroup
    """The same, for activations."""
    tensor: dist.ProcessGroup
    """The ranks that share a dense layer."""
    expert: dist.ProcessGroup
    """The ranks that share experts: those of a stage. The same group, unless dense layers have copies."""
    first: int
    """Number of the replica group's rank 0 in torch's world."""
    owns_world: bool
    """Whether torch's world was created for this replica group, and ends with it."""

    @property
    def of_tensors(self) -> list[dist.ProcessGroup]:
        """The groups that exchange tensors of the model, each once."""
        return list(dict.fromkeys((self.expert, self.tensor, self.pipeline)))

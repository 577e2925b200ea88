"""The choice of the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.expert_kernels import route_rows
from megatron_runtime.gpu.launch import launch, power_of_two


@dataclass(frozen=True)
class Choice:
    """How the experts of a token are chosen and weighted."""

    per_token: int
    scores: str
    """"softmax" or "sigmoid"."""
    normalizes: bool
    """Whether the weights are divided by their sum."""
    multiplier: float
    """Of the weights, in the end."""
    groups: int = 1
    """Groups of consecutive experts; the chosen ones are in the ``best_groups`` best ones."""
    best_groups: int = 1
    sums_two: bool = False
    """Whether groups are compared by the sum of their two best experts, not by the best one."""
    adds_shared: bool = False
    """Whether each token has one expert more: that after the last one, with weight one."""


def route(logits: Tensor, choice: Choice, bias: Tensor | None, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, float32, and chosen experts, int64, both [T, per_token], by one launch; one column more if the choice
    adds a shared expert.

    Of experts that rank equally, the first are chosen.

    Args:
        logits: [T, experts], contiguous.
        choice: The rules.
        bias: float32 [experts], added to the scores for the choice.
        replayed: int64 [T, per_token], the experts to choose, and a negative number where the logits choose.
    """
    (tokens, count), per_token = logits.shape, choice.per_token
    columns = per_token + 1 if choice.adds_shared else per_token
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, columns, dtype=torch.int64, device=logits.device)
    members = count // choice.groups
    launch(
        route_rows,
        (tokens,),
        (
            *(weights, chosen, logits, logits if bias is None else bias),
            *(chosen if replayed is None else replayed.contiguous(), float(choice.multiplier)),
        ),
        GROUPS=choice.groups,
        GROUPS_PAD=power_of_two(choice.groups),
        MEMBERS=members,
        MEMBERS_PAD=power_of_two(members),
        BEST_GROUPS=choice.best_groups,
        SUMS_TWO=choice.sums_two,
        PER_TOKEN=per_token,
        PER_TOKEN_PAD=power_of_two(per_token),
        SIGMOID=choice.scores == "sigmoid",
        BIASED=bias is not None,
        REPLAYED=replayed is not None,
        NORMALIZES=choice.normalizes,
        ADDS_SHARED=choice.adds_shared,
        num_warps=1,
    )
    return weights, chosen

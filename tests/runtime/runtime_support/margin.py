"""The margin of an answer: for a smaller one, two ways of rounding may give different answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_runtime.engine.sampling.exponential_noise import exponential_noise, noise_keys
from megatron_runtime.sampling_params import SamplingParams


@torch.inference_mode()
def least_margin(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams) -> float:
    """The smallest margin of the answer's tokens, as a difference of logits; below 0 where a token was not the best.

    Args:
        model: Of transformers, in float32.
        prompt: Token ids.
        answer: The tokens that followed, without penalties or filters.
        params: Their temperature and seed.
    """
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    if params.temperature:
        lengths = np.arange(len(prompt), len(prompt) + len(answer))
        keys = noise_keys(np.full(len(answer), params.seed, dtype=np.uint64), lengths)
        logits = logits / params.temperature - exponential_noise(keys, torch.arange(logits.shape[1])).log()
    chosen = torch.tensor(answer)[:, None]
    others = logits.scatter(1, chosen, -torch.inf).amax(dim=1)
    return float((logits.gather(1, chosen)[:, 0] - others).min())

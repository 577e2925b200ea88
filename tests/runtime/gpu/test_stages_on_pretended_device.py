"""Stages of a pipeline on a pretended GPU, which divide the sum of a layer from the norm of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.small_engine import on_gpu, random_decoder
from torch import Tensor

from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.single_rank import SingleRank

PROMPT = [65, 80, 66, 67, 90]
STAGES = 2
NORMS: dict[str, dict[str, Any]] = {
    "before": {},
    "before both networks": {"norm": "layer", "parallel_feed_forward": True},
    "after": {"norm_placement": "after"},
    "around": {"architecture": "gemma2", "norm": "rms_plus_one", "norm_placement": "around"},
}

pytestmark = pytest.mark.usefixtures("device_guard")


class Stage(SingleRank):
    """A stage in this process: what it sends is in ``sent``."""

    def __init__(self, stage: int, sent: list[Tensor]) -> None:
        super().__init__()
        self.position = RankPosition(ParallelSizes(pipeline=STAGES), stage)
        self._sent = sent

    def send(self, hidden: Tensor) -> None:
        """To the next stage."""
        self._sent.append(hidden)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """From the previous stage."""
        hidden = self._sent.pop()
        assert (hidden.shape, hidden.dtype) == (tuple(shape), dtype)
        return hidden


def logits_of(decoder: Decoder) -> Tensor | None:
    """After a prompt, on the GPU."""
    cache = KVCache(decoder.shard.cache_config, 1, 16, decoder.dtype, "cuda")
    batch = {
        "tokens": torch.tensor(PROMPT),
        "positions": torch.arange(len(PROMPT)),
        "slots": torch.arange(len(PROMPT)),
        "query_starts": torch.tensor([0, len(PROMPT)], dtype=torch.int32),
        "context_lengths": torch.tensor([len(PROMPT)], dtype=torch.int32),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "logit_rows": torch.tensor([len(PROMPT) - 1]),
    }
    logits: Tensor | None = decoder(ForwardBatch(**{name: each.to("cuda") for name, each in batch.items()}), cache)
    return None if logits is None else logits.cpu()


@pytest.mark.parametrize("changes", NORMS.values(), ids=NORMS)
def test_stages_have_the_logits_of_one_rank_by_compiled_kernels(
    changes: dict[str, Any], device: PretendedDevice
) -> None:
    """The sum at the end of a stage has another kernel than those between its layers."""
    whole = on_gpu(random_decoder(num_layers=4, **changes))
    weights, sent = whole.destinations(), list[Tensor]()
    stages = [Decoder(whole.config, dtype=whole.dtype, device="cuda", ranks=Stage(n, sent)) for n in range(STAGES)]
    for stage in stages:
        for name, place in stage.destinations().items():
            place.copy_(weights[name])
        stage.prepare_kernels(16)
    compiled, device.work = device.work.variants, Work()
    first, last = (logits_of(stage) for stage in stages)
    assert first is None
    assert device.work.variants <= compiled, "a request would wait for the compiler"
    expected = logits_of(whole)
    assert last is not None
    assert expected is not None
    assert torch.equal(last, expected)

"""The setting that the results of a request do not depend on other requests."""

from __future__ import annotations

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kernels.gpu_attention import has_gpu_attention
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.products import fix_rows


def make_batch_invariant(model: Decoder, kv_cache: KVCache) -> None:
    """Let the bits of a request's results on a GPU not depend on its batch; on a CPU nothing has to change.

    Raises:
        ConfigurationError: Other parts of the computation depend on the batch.
    """
    if model.device.type == "cpu":
        return
    obstacle = None
    if model.ranks.position.sizes.ranks_per_replica_group > 1:
        obstacle = "the order in which several ranks add their parts may depend on the size of the batch"
    elif model.flashinfer is not None:
        obstacle = "FlashInfer divides contexts by the batch"
    elif kv_cache.is_resident and not has_gpu_attention(kv_cache):
        obstacle = "the attention of this model is PyTorch's, whose bits depend on the batch"
    elif model.config.recurrent is not None:
        obstacle = "the recurrent layers of this model have PyTorch's sums, whose bits may depend on the batch"
    if obstacle is not None:
        raise ConfigurationError(f"batch_invariant=True: {obstacle}; leave it out", field="batch_invariant")
    fix_rows(model)

"""The memory of a pass besides weights and KV cache, estimated from the sizes of the model. Without torch."""

from __future__ import annotations

from megatron_runtime.model.shard import Shard

MOST_RECORDED_ROWS = 256
"""Of passes that a CPU records. In larger ones, the time between kernels matters less than their memory."""
RECORDED_ROWS = 4 * MOST_RECORDED_ROWS
"""At least as many as all recordings have together: two layers, each for 1, 2, 4 and so on up to the most rows."""
_RESIDUAL_COPIES = 4
"""The residual path before a layer and after its attention, and the norms of both."""


def activation_elements(shard: Shard) -> int:
    """Elements per token that a rank's widest layer holds at once, beside the residual path: an upper estimate."""
    config = shard.local
    heads = config.num_attention_heads + 2 * config.num_kv_heads
    # The projection, its rotated copy, and the output of the attention.
    attention = (2 * heads + config.num_attention_heads) * config.head_dim
    # Gates and values of a feed-forward network, and their product.
    widths = [3 * len(shard.channels)]
    if config.experts is not None:
        inner = 3 * len(shard.expert_channels(config.experts)) + 3 * config.hidden_size
        widths.append(config.experts.per_token * inner)
    if (recurrent := config.recurrent) is not None:
        # The projection, its float32 copy and its parts, which take twice the memory in 16 bits.
        widths.append(7 * (recurrent.channels + recurrent.values))
    return _RESIDUAL_COPIES * config.hidden_size + max(attention, *widths)

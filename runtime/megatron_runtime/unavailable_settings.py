"""Settings of Megatron's engine for what this one does otherwise or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.errors import ConfigurationError


@dataclass(kw_only=True)
class UnavailableSettings:
    """Fields that code written for Megatron may pass on, as long as they ask for nothing.

    Each takes the values that say "not used" and refuses all others, so that none is silently without effect.

    Raises:
        ConfigurationError: A setting that asks for what there is not, naming field, value and what to do instead.
    """

    num_cuda_graphs: int | None = None
    cuda_graph_mixed_prefill_count: int = 16
    cuda_graph_sizing_distribution: str = "exponential"
    use_cuda_graphs_for_non_decode_steps: bool = True
    cuda_graph_all_prefills: bool = False
    cuda_graph_max_tokens: int = 512
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: float | None = None
    prefix_caching_mamba_gb: float | None = None
    unified_memory_level: int = 0
    pg_collection: Any = None
    image_preprocessing_config: Any = None
    use_flashinfer_fused_rope: bool | None = False
    num_speculative_tokens: int = 0
    async_sched_mode: str = "legacy"
    request_metadata_types: Any = None
    use_synchronous_zmq_collectives: bool = False
    disable_ep_consensus: bool = False
    ep_consensus_interval: int = 20

    def _refuse_unavailable(self) -> None:
        for name, (allowed, reason) in _REFUSALS.items():
            value = getattr(self, name)
            if not any(value is each or value == each for each in allowed):
                usual = " or ".join(repr(each) for each in allowed)
                raise ConfigurationError(f"{name}={value!r}: {reason}; leave it out, or give {usual}", field=name)


_NO_GRAPHS = "there are no CUDA graphs, every pass runs eagerly"
_NO_RECURRENT_LAYERS = "no model here has recurrent layers, whose states would need memory"
_NO_CONSENSUS = "replicas run without lock step, so that they have nothing to agree on"
_REFUSALS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_cuda_graphs": ((None, 0), _NO_GRAPHS),
    "cuda_graph_mixed_prefill_count": ((16,), _NO_GRAPHS),
    "cuda_graph_sizing_distribution": (("exponential",), _NO_GRAPHS),
    "use_cuda_graphs_for_non_decode_steps": ((True,), _NO_GRAPHS),
    "cuda_graph_all_prefills": ((False,), _NO_GRAPHS),
    "cuda_graph_max_tokens": ((512,), _NO_GRAPHS),
    "mamba_inference_state_config": ((None,), _NO_RECURRENT_LAYERS),
    "mamba_memory_ratio": ((None,), _NO_RECURRENT_LAYERS),
    "prefix_caching_mamba_gb": ((None,), _NO_RECURRENT_LAYERS),
    "unified_memory_level": (
        (0,),
        "the KV cache lies on the model's device alone; kv_cache_management_mode='offload' moves it while suspended",
    ),
    "pg_collection": ((None,), "the engine takes its ranks from torch.distributed"),
    "image_preprocessing_config": ((None,), "models read text only"),
    "use_flashinfer_fused_rope": ((False, None), "rotary embeddings are computed by the model itself"),
    "num_speculative_tokens": ((0,), "models are loaded without heads that draft tokens"),
    "async_sched_mode": (("legacy",), "a pass is scheduled once the one before it has ended"),
    "request_metadata_types": ((None,), "the metadata of requests are those of get_metadata_types"),
    "use_synchronous_zmq_collectives": ((False,), _NO_CONSENSUS),
    "disable_ep_consensus": ((False,), _NO_CONSENSUS),
    "ep_consensus_interval": ((20,), _NO_CONSENSUS),
}

"""Settings of Megatron's engine for features that this engine does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.errors import ConfigurationError


@dataclass(kw_only=True)
class UnavailableSettings:
    """Fields that code written for Megatron may pass at their neutral values.

    Each field accepts the values that mean "not used" and rejects all others, so that no setting is silently ignored.

    Raises:
        ConfigurationError: A setting requests a missing feature; names field, value and remedy.
    """

    mamba_inference_state_config: Any = None
    unified_memory_level: int = 0
    pg_collection: Any = None
    """Megatron's process groups of a model on one rank; ``pg_collection`` of the engine returns them."""
    image_preprocessing_config: Any = None
    use_flashinfer_fused_rope: bool | None = False
    request_metadata_types: Any = None
    use_synchronous_zmq_collectives: bool = False
    disable_ep_consensus: bool = False
    ep_consensus_interval: int = 20

    def _refuse_unavailable(self) -> None:
        for name, (allowed, reason) in _REFUSALS.items():
            value = getattr(self, name)
            if name == "pg_collection" and _has_one_rank(value):
                continue
            if not any(value is each or value == each for each in allowed):
                usual = " or ".join(repr(each) for each in allowed)
                raise ConfigurationError(f"{name}={value!r}: {reason}; leave it out, or set {usual}", field=name)


def _has_one_rank(groups: Any) -> bool:
    """Whether each of these process groups that divide a model has one rank."""
    known = [getattr(groups, name, None) for name in ("tp", "pp", "ep")]
    sizes = [group.size() for group in known if group is not None]
    return bool(sizes) and max(sizes) == 1


_NO_CONSENSUS = "data-parallel ranks run independently and need no consensus"
_REFUSALS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "mamba_inference_state_config": (
        (None,),
        "the engine reads the layers with recurrent states, and the shapes of these, from the model",
    ),
    "unified_memory_level": (
        (0,),
        "the KV cache is only on the model's device; kv_cache_management_mode='offload' moves it while suspended",
    ),
    "pg_collection": ((None,), "the engine gets the ranks of a divided model from torch.distributed"),
    "image_preprocessing_config": ((None,), "only text is supported"),
    "use_flashinfer_fused_rope": ((False, None), "the model itself computes rotary embeddings"),
    "request_metadata_types": ((None,), "the metadata of a request has the types of get_metadata_types"),
    "use_synchronous_zmq_collectives": ((False,), _NO_CONSENSUS),
    "disable_ep_consensus": ((False,), _NO_CONSENSUS),
    "ep_consensus_interval": ((20,), _NO_CONSENSUS),
}

"""Models, settings and parameters with which an engine on a GPU has to generate the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_support.small_engine import LATENTS, LOWER_CASE, suspend_and_resume
from runtime_support.adapters import write_adapter_of

from megatron_runtime.model.config import ClampedGate, ExpertsConfig, QueryTemperature
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config

EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=64)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "all samplers": {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05}},
    "edits": {
        "params": {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2},
        "config": {"max_sequence_length": 250},
    },
    "grammar": {"params": {"temperature": 1.0, "grammar": LOWER_CASE, "ignore_eos": False}},
    "windows and soft cap": {"model": {"layer_windows": (8, None), "attention_soft_cap": 20.0}},
    "norms around, a gate of gelu, scaled embeddings": {
        "model": {
            **{"norm": "rms_plus_one", "norm_placement": "around", "activation": "gelu_tanh"},
            **{"embedding_multiplier": 5.5, "query_key_norm": "head", "residual_multiplier": 0.5},
        }
    },
    "norms after, norms of all heads together": {
        "model": {"norm_placement": "after", "query_key_norm": "projection", "residual_multiplier": 0.5}
    },
    "means, no gate, learned positions": {
        "model": {"norm": "layer", "gated_feed_forward": False, "activation": "gelu", "learned_positions": 512}
    },
    "chunks of attention, sinks, a temperature, clamped gates": {
        "model": {
            **{"layer_windows": (8, None), "chunked_windows": True, "attention_sinks": True},
            **{"query_temperature": QueryTemperature(0.3, 8), "query_key_norm": "unweighted", "rope_interleave": True},
            **{"norm": "layer_without_bias", "parallel_feed_forward": True, "clamped_gate": ClampedGate(1.7, 0.5)},
        }
    },
    "latents": {"model": LATENTS, "config": {"max_tokens": 16, "enable_prefix_caching": True}},
    "latents, all samplers, windows": {
        "model": LATENTS | {"layer_windows": (8, None), "attention_soft_cap": 20.0},
        "params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    },
    "experts": {"model": {"architecture": "mixtral", "experts": EXPERTS}},
    "chunks and prefixes": {"config": {"max_tokens": 16, "enable_prefix_caching": True}},
    "offload": {"config": {"kv_cache_management_mode": "offload"}, "between": suspend_and_resume},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "gated delta rule": {
        "model": {
            "recurrent": GatedDeltaConfig(frozenset({0}), key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=3)
        }
    },
    "selective state spaces": {
        "model": {
            "recurrent": Mamba2Config(frozenset({0}), key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=3),
            "num_layers": 3,
            "feed_forward_layers": frozenset({1}),
        }
    },
}
"""The same, for models with recurrent layers."""
ADAPTED = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 64)}
"""Modules with adapters, and the shapes of their matrices in `random_decoder`."""


def write_adapters(folder: Path) -> list[Path]:
    """Two adapters of these modules in the first layer, "one" and "three"."""
    shapes = {f"model.layers.0.{name}": size for name, size in ADAPTED.items()}
    targets = [name.rpartition(".")[2] for name in ADAPTED]
    return [write_adapter_of(folder / name, shapes, targets=targets, seed=len(name)) for name in ("one", "three")]

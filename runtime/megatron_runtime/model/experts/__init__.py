"""Mixture-of-experts layers: routers select experts for each token, and experts process the tokens."""

from __future__ import annotations

from megatron_runtime.model.experts.layer import Experts

__all__ = ["Experts"]

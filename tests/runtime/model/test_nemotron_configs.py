"""The configurations of Nemotron-H: its layers, its time steps, and the errors of unsupported fields."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from runtime_support.reference_models import SIZES

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.hugging_face_config import hugging_face_config
from megatron_runtime.model.recurrent_config import Mamba2Config

EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
FIELDS: dict[str, Any] = (
    {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | EXPERTS
)
WITHOUT_LIST = FIELDS | {"layers_block_type": None}


def read_config(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    """The configuration from a ``config.json`` with only ``fields``."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return hugging_face_config(path)


def recurrent_of(folder: Path, **fields: Any) -> Mamba2Config:
    sizes = read_config(folder, FIELDS | fields).recurrent
    assert isinstance(sizes, Mamba2Config)
    return sizes


def test_the_kinds_of_layers_are_the_same_in_every_spelling(tmp_path: Path) -> None:
    config = read_config(tmp_path, FIELDS)
    assert [config.kind(layer) for layer in range(4)] == ["recurrence", "feed_forward", "attention", "feed_forward"]
    assert [config.experts_of(layer) is not None for layer in range(4)] == [False, True, False, False]
    earlier = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 7}
    assert read_config(tmp_path, FIELDS | earlier) == config
    for count in ({}, {"num_hidden_layers": 4}):
        assert read_config(tmp_path, WITHOUT_LIST | {"hybrid_override_pattern": "ME*-"} | count) == config


def test_earlier_names_of_the_fields_of_mamba(tmp_path: Path) -> None:
    newer = recurrent_of(tmp_path, n_groups=4, conv_kernel=3, use_conv_bias=False, time_step_limit=[0.5, 2])
    earlier = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_limit": [0.5, 2]}
    assert recurrent_of(tmp_path, **earlier) == newer
    assert (newer.key_heads, newer.taps, newer.has_convolution_bias) == (4, 3, False)


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.001, {"__float__": "Infinity"}], (0.001, math.inf)),
        ([0, 0.5], (0.0, 0.5)),
    ],
)
def test_the_limits_of_time_steps(written: list[Any] | None, limits: tuple[float, float], tmp_path: Path) -> None:
    assert recurrent_of(tmp_path, time_step_limit=written, time_step_min=0.01).step_limits == limits


def test_the_head_dimension_has_an_earlier_name_too(tmp_path: Path) -> None:
    assert read_config(tmp_path, FIELDS | {"head_dim": None}).head_dim == 128
    assert read_config(tmp_path, FIELDS | {"head_dim": None, "attention_head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"layers_block_type": ["mamba", "conv"]},
            "layers_block_type has 'conv', expected one of linear_attention, fu",
        ),
        ({"layers_block_type": ["mamba", "mlp"]}, "none of 2 layers has attention, expected one or more"),
        ({"layers_block_type": ["attention", "mlp"]}, "0 of 2 layers are recurrent, expected 1 to 1"),
        ({"layers_block_type": None}, "hybrid_override_pattern is missing, expected a string"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*x"},
            "hybrid_override_pattern has 'x', expected letters among M * - E",
        ),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*", "num_hidden_layers": 3},
            "hybrid_override_pattern has 2 letters for 3 layers",
        ),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', only 'relu2' is supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu', only 'silu' is supported"),
        ({"attention_bias": True}, "attention_bias is True, only False is supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True, only False is supported"),
        ({"sliding_window": 8}, "sliding_window is 8, only null is supported"),
        ({"residual_in_fp32": True}, "residual_in_fp32 is True, only False is supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, only False is supported"),
        ({"moe_latent_size": 8}, "moe_latent_size is 8, only null is supported"),
        ({"mlp_bias": True}, "mlp_bias is True, only False is supported"),
        ({"time_step_limit": [0.1]}, "time_step_limit is [0.1], expected two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, "the limits of time steps are 2.0 and 1.0, expected 0 or more and a larger"),
        ({"n_groups": 7}, "128 value heads can't share 7 key heads evenly"),
        ({"n_routed_experts": None}, "n_routed_experts is missing, expected an integer"),
        ({"n_group": 3}, "number of expert groups is 3, expected a divisor of 4 experts"),
    ],
)
def test_an_unsupported_configuration_is_refused_by_its_field(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config(tmp_path, FIELDS | fields)

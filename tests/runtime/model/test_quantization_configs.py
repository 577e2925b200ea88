"""The fields of ``quantization_config``: schemes of modules, and settings that are refused, for int4 and int8."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from runtime_support.quantized_safetensors import (
    LLAMA,
    assert_same_weights,
    compressed_config,
    edit_tensors,
    gptq_config,
    quantize_folder,
    to_gptq,
    to_packed,
)
from safetensors.torch import load_file, save_file

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
UP = "model.layers.1.mlp.up_proj"


def test_groups_of_modules_have_their_own_schemes(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    settings = compressed_config("pack-quantized", 4, 32)
    wide = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": wide}
    narrow, other = to_packed(4, 32), to_packed(8, 0)
    pair = quantize_folder(
        tmp_path / "it", lambda matrix: (other if matrix.shape == (96, 160) else narrow)(matrix), settings
    )
    assert_same_weights(pair)


def test_the_name_of_a_module_comes_before_expressions_and_these_before_classes(
    tmp_path: Path, save_model: Any
) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    settings = compressed_config("pack-quantized", 8, 16)
    for number, (target, bits) in enumerate((("re:.*layers.1.*down_proj$", 4), ("model.layers.1.mlp.down_proj", 8))):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        settings["config_groups"][f"further_{number}"] = {"targets": [target], "weights": weights}
    pair = quantize_folder(tmp_path / "it", to_packed(8, 16), settings)
    name = "model.layers.1.mlp.down_proj"
    matrix = load_file(pair.plain / "model.safetensors")[f"{name}.weight"]
    coded, pair.weights[f"{name}.weight"] = to_packed(8, 32)(matrix)
    edit_tensors(pair, {f"{name}.{ending}": part.contiguous() for ending, part in coded.items()})
    plain = load_file(pair.plain / "model.safetensors") | {f"{name}.weight": pair.weights[f"{name}.weight"].float()}
    save_file(plain, pair.plain / "model.safetensors")
    assert_same_weights(pair)


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_the_settings_may_be_in_other_places(place: str, tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    pair = quantize_folder(tmp_path / "it", to_packed(4, 32), compressed_config("pack-quantized", 4, 32))
    path = pair.quantized / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    if place == "compression_config":
        del settings["quant_method"]
        config[place] = settings
    else:
        config[place] = {"quantization_config": settings}
    path.write_text(json.dumps(config))
    assert_same_weights(pair)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (gptq_config(3, 32), "quantization_config.bits is 3, expected 4 or 8"),
        (gptq_config(4, 0), "quantization_config.group_size is 0, expected -1, or 1 or more"),
        (
            gptq_config(4, 32, checkpoint_format="marlin"),
            "checkpoint_format is 'marlin', expected one of gptq, gptq_v2",
        ),
        (
            gptq_config(4, 32, is_marlin_format=True),
            "quantization_config.is_marlin_format is True, only False is supported",
        ),
        (
            gptq_config(4, 32, pack_dtype="int16"),
            "quantization_config.pack_dtype is 'int16', only 'int32' is supported",
        ),
        (gptq_config(4, 32, dynamic={"+:.*down.*": {"bits": 8}}), "dynamic has bits 8 for +:.*down.*, expected 4"),
        (AWQ | {"bits": 8}, "quantization_config.bits is 8, expected 4"),
        (AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv', expected 'gemm'"),
        (AWQ | {"backend": "llm-awq"}, "quantization_config.backend is 'llm-awq', only 'autoawq' is supported"),
        (compressed_config("pack-quantized", 2, 32), "type is 'int' with quantization_config.config_groups.group_0"),
        (compressed_config("marlin-24", 4, 32), "quantization_config.format is 'marlin-24', the known ones are"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:60],
)
def test_settings_that_are_not_supported_are_named(
    settings: dict[str, Any], said: str, tmp_path: Path, save_model: Any
) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    pair = quantize_folder(tmp_path / "it", to_gptq(4, 32), settings)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(pair.quantized)


def test_a_target_that_is_no_expression_is_named(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    settings = compressed_config("pack-quantized", 4, 32)
    settings["config_groups"]["group_0"]["targets"] = ["re:("]
    pair = quantize_folder(tmp_path / "it", to_packed(4, 32), settings)
    with pytest.raises(
        CheckpointError, match=r"config_groups.group_0.targets has 're:\(', which is no regular expression"
    ):
        inspect_checkpoint(pair.quantized)


def test_modules_that_dynamic_leaves_out_are_plain(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **LLAMA)
    pair = quantize_folder(tmp_path / "it", to_gptq(4, 32), gptq_config(4, 32, dynamic={"-:.*up_proj": {}}))
    plain = {f"{UP}.weight": load_file(pair.plain / "model.safetensors")[f"{UP}.weight"]}
    edit_tensors(
        pair, plain | dict.fromkeys((f"{UP}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")), None)
    )
    assert_same_weights(pair)

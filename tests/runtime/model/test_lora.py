"""LoRA adapters in peft's format have the logits of merged weights, row by row."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.adapters import LINEAR, merged, write_adapter
from runtime_support.family_models import NEMOTRON_H, QWEN_3_5, QWEN_3_NEXT, SIZES
from runtime_support.model_scenarios import adapt
from runtime_support.rank_processes import run_ranks
from runtime_support.reference_models import CLOSE, new_model, precise_logits_of
from safetensors.torch import load_file, save_file
from suite_support.worker import free_port

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.adapters import load_adapter
from megatron_runtime.model.checkpoint import load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.refit import offload_weights, restore_weights, update_weights
from megatron_runtime.parallel.layout import ParallelSizes

QWEN_3_5_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {}, LINEAR),
    "attention alone": ("Llama", {"attention_bias": True, "mlp_bias": True}, ("q_proj", "v_proj")),
    "qwen3": ("Qwen3", {"head_dim": 16}, LINEAR),
    "gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}, LINEAR),
    "fused projections": ("Phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "transposed matrices": ("GPT2", {}, ("c_attn", "c_proj", "c_fc")),
    "without a gate": ("Starcoder2", {}, ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj")),
    "attention beside experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
        ATTENTION,
    ),
    "gated delta layers": ("Qwen3Next", QWEN_3_NEXT, (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj")),
    "gated delta layers without experts": (
        "Qwen3Next",
        QWEN_3_NEXT | {"mlp_only_layers": [0, 1, 2]},
        (*LINEAR, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    ),
    "separate inputs of gated delta layers": ("Qwen3_5", QWEN_3_5, (*ATTENTION, *QWEN_3_5_INPUTS, "out_proj")),
    "separate inputs of gated delta layers beside experts": (
        "Qwen3_5Moe",
        QWEN_3_NEXT,
        (*ATTENTION, "in_proj_qkv", "in_proj_b", "out_proj"),
    ),
    "mamba layers": ("NemotronH", NEMOTRON_H, (*ATTENTION, "in_proj", "out_proj")),
    "mamba layers without experts": (
        "NemotronH",
        NEMOTRON_H | {"layers_block_type": ["mamba", "mlp", "attention"], "use_bias": True, "mlp_bias": True},
        (*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj"),
    ),
}
TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def write_model(folder: Path, family: str = "Llama", **settings: Any) -> Any:
    """Save a random model of ``family`` and return it."""
    model = new_model(family, **(SIZES | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    model.save_pretrained(folder)
    return model


def paged(paged_requests: Any, decoder: Decoder, **adapters: int) -> Any:
    requests = paged_requests(decoder, num_blocks=128, block_size_tokens=4)
    requests.adapters = adapters
    return requests


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_merged_weights(name: str, tmp_path: Path, paged_requests: Any) -> None:
    family, settings, targets = FAMILIES[name]
    model = write_model(tmp_path / "model", family, **settings)
    folder = write_adapter(tmp_path / "adapter", model, targets=targets, std=0.1)
    decoder = load_model(tmp_path / "model", dtype="float32")
    load_adapter(decoder, 0, folder, max_rank=64)
    expected = precise_logits_of(merged(model, folder), TOKENS)
    assert not torch.allclose(expected, precise_logits_of(model, TOKENS), atol=0.1), "the adapter changes the logits"
    requests = paged(paged_requests, decoder, it=0)
    parts = [requests.forward({"it": TOKENS[a:b]})["it"] for a, b in pairwise([0, 9, 10, 11, 30, 40])]
    torch.testing.assert_close(torch.cat(parts), expected, **CLOSE)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.mlp.down_proj": 2.0}},
        {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_the_fields_of_the_configuration_are_those_of_peft(
    fields: dict[str, Any], tmp_path: Path, paged_requests: Any
) -> None:
    model = write_model(tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", model, **fields)
    decoder = load_model(tmp_path / "model", dtype="float32")
    load_adapter(decoder, 0, folder, max_rank=64)
    ours = paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"]
    torch.testing.assert_close(ours, precise_logits_of(merged(model, folder), TOKENS), **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gated delta layers", "mamba layers without experts"])
def test_the_bits_of_a_request_do_not_depend_on_the_others(
    name: str, dtype: str, tmp_path: Path, paged_requests: Any
) -> None:
    family, settings, targets = FAMILIES[name]
    model = write_model(tmp_path / "model", family, **settings)
    decoder = load_model(tmp_path / "model", dtype=dtype)
    plain = paged(paged_requests, decoder).forward({"it": TOKENS})["it"]
    for slot, rank in enumerate((3, 8, 1)):
        folder = write_adapter(tmp_path / str(slot), model, targets=targets, rank=rank, seed=slot)
        load_adapter(decoder, slot, folder, max_rank=8)
    adapters = {f"with {slot}": slot for slot in range(3)}
    alone = {name: token_by_token(paged(paged_requests, decoder, it=slot)) for name, slot in adapters.items()}
    together = paged(paged_requests, decoder, **adapters).forward(dict.fromkeys(["without", *adapters], TOKENS))
    assert torch.equal(together["without"], plain)
    for name in adapters:
        assert torch.equal(together[name], alone[name])
        assert not torch.equal(together[name], plain)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_adapters_of_different_modules_share_a_batch(
    has_kernel: bool, tmp_path: Path, paged_requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel of a CPU, and with the products of other devices."""
    monkeypatch.setattr("megatron_runtime.model.lora.adapted_linear.has_cpu_row_kernels", lambda _: has_kernel)
    model = write_model(tmp_path / "model")
    decoder = load_model(tmp_path / "model", dtype="float32")
    folders = {}
    for slot, targets in enumerate((("down_proj",), ("q_proj", "down_proj"), ("v_proj", "o_proj"), ("up_proj",))):
        folders[f"{slot}"] = write_adapter(tmp_path / str(slot), model, targets=targets, rank=slot + 2, seed=slot)
        load_adapter(decoder, slot, folders[f"{slot}"], max_rank=8)
    requests = paged(paged_requests, decoder, **{name: int(name) for name in folders})
    together = requests.forward(dict.fromkeys(["without", *folders], TOKENS))
    torch.testing.assert_close(together["without"], precise_logits_of(model, TOKENS), **CLOSE)
    for name, folder in folders.items():
        torch.testing.assert_close(together[name], precise_logits_of(merged(model, folder), TOKENS), **CLOSE)


@pytest.mark.parametrize("start", ["model", "backbone"])
def test_modules_have_the_names_of_transformers_or_those_of_the_checkpoint(
    start: str, tmp_path: Path, paged_requests: Any
) -> None:
    """Nemotron-H's differ; ranks and factors apply to the names in the adapter."""
    family, settings, _ = FAMILIES["mamba layers"]
    model = write_model(tmp_path / "model", family, **settings)
    fields = {"rank_pattern": {"model.layers.0.mixer.in_proj": 7}, "alpha_pattern": {"model.layers.0.mixer.in_proj": 2}}
    folder = write_adapter(tmp_path / "adapter", model, targets=["in_proj", "o_proj"], **fields)
    expected = precise_logits_of(merged(model, folder), TOKENS)
    tensors, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    renamed = {name.replace("model.layers", f"{start}.layers"): each for name, each in load_file(tensors).items()}
    save_file(renamed, tensors)
    config.write_text(config.read_text().replace("model.layers", f"{start}.layers"))
    decoder = load_model(tmp_path / "model", dtype="float32")
    load_adapter(decoder, 0, folder, max_rank=64)
    torch.testing.assert_close(paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"], expected, **CLOSE)


@pytest.mark.parametrize("start", ["model", "model.language_model"])
def test_modules_of_a_multimodal_model_have_its_names_or_those_of_the_text_model(
    start: str, tmp_path: Path, paged_requests: Any
) -> None:
    """Adapters are trained on either class of transformers."""
    family, settings, targets = FAMILIES["separate inputs of gated delta layers"]
    model = write_model(tmp_path / "model", family, **settings)
    path = tmp_path / "model" / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    weights = tmp_path / "model" / "model.safetensors"
    longer = {re.sub(r"^model\.", "model.language_model.", name): each for name, each in load_file(weights).items()}
    save_file(longer, weights)
    folder = write_adapter(tmp_path / "adapter", model, targets=targets)
    expected = precise_logits_of(merged(model, folder), TOKENS)
    tensors = folder / "adapter_model.safetensors"
    renamed = {name.replace("model.layers", f"{start}.layers"): each for name, each in load_file(tensors).items()}
    save_file(renamed, tensors)
    decoder = load_model(tmp_path / "model", dtype="float32")
    assert decoder.config.architecture == "qwen3_5"
    load_adapter(decoder, 0, folder, max_rank=64)
    torch.testing.assert_close(paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"], expected, **CLOSE)


def token_by_token(requests: Any) -> torch.Tensor:
    return torch.cat([requests.forward({"it": [token]})["it"] for token in TOKENS])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", ParallelSizes(tensor=2)),
        ("llama", ParallelSizes(tensor=2, pipeline=2)),
        ("gated delta layers", ParallelSizes(tensor=2)),
        ("separate inputs of gated delta layers", ParallelSizes(tensor=2)),
        ("mamba layers", ParallelSizes(tensor=2)),
        ("mamba layers", ParallelSizes(pipeline=2)),
        ("fused projections", ParallelSizes(tensor=2)),
        ("transposed matrices", ParallelSizes(tensor=2)),
    ],
    ids=str,
)
def test_ranks_divide_an_adapter_as_the_weights(family: str, sizes: ParallelSizes, tmp_path: Path) -> None:
    kind, settings, targets = FAMILIES[family]
    model = write_model(tmp_path / "model", kind, **settings)
    folders = [
        write_adapter(tmp_path / str(seed), model, targets=targets, rank=2 + seed, seed=seed, std=0.1)
        for seed in range(2)
    ]
    ranks = sizes.ranks_per_replica_group
    results = run_ranks(adapt, ranks, sizes, free_port(), tmp_path / "model", folders, TOKENS)
    (logits,) = (each["logits"] for each in results if each["logits"] is not None)
    for part, adapted in zip(
        logits.split(len(TOKENS)), (*(merged(model, each) for each in folders), model), strict=True
    ):
        expected = precise_logits_of(adapted, TOKENS)
        # The largest difference is that of an element which the random gated delta layers amplify, up to 1.1e-4.
        assert (part - expected).norm() <= 2e-5 * expected.norm()
    for each in results:
        assert "is damaged" in each["complaint"], "all ranks refuse what one can't read"


@pytest.mark.parametrize("name", ["llama", "mamba layers without experts"])
def test_adapters_outlive_other_weights_and_a_suspension(name: str, tmp_path: Path, paged_requests: Any) -> None:
    family, settings, targets = FAMILIES[name]
    model = write_model(tmp_path / "model", family, **settings)
    other = write_model(tmp_path / "other", family, **settings)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    folder = write_adapter(tmp_path / "adapter", model, targets=targets, std=0.1)
    decoder = load_model(tmp_path / "model", dtype="float32")
    load_adapter(decoder, 0, folder, max_rank=64)
    update_weights(decoder, tmp_path / "other")
    expected = precise_logits_of(merged(other, folder), TOKENS)
    torch.testing.assert_close(paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"], expected, **CLOSE)
    offload_weights(decoder)
    restore_weights(decoder, torch.device("cpu"))
    torch.testing.assert_close(paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"], expected, **CLOSE)


def test_a_freed_slot_takes_another_adapter(tmp_path: Path, paged_requests: Any) -> None:
    model = write_model(tmp_path / "model")
    first, second = (write_adapter(tmp_path / name, model, rank=len(name), seed=len(name)) for name in ("one", "other"))
    decoder = load_model(tmp_path / "model", dtype="float32")
    load_adapter(decoder, 0, first, max_rank=64)
    load_adapter(decoder, 1, second, max_rank=64)
    slots = decoder.use_adapters()
    slots.free(0)
    load_adapter(decoder, 0, second, max_rank=64)
    slots.free(1)
    ours = paged(paged_requests, decoder, it=0).forward({"it": TOKENS})["it"]
    torch.testing.assert_close(ours, precise_logits_of(merged(model, second), TOKENS), **CLOSE)
    slots.free(0)
    assert len(slots) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "use_dora": ({"use_dora": True}, "use_dora=False"),
    "bias": ({"bias": "all"}, 'bias="none"'),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "without modules_to_save"),
    "peft_type": ({"peft_type": "IA3"}, "only LORA"),
    "init_lora_weights": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    "target_modules": ({"target_modules": "(q_proj"}, "regular expression"),
    "r=0": ({"r": 0}, "positive integer"),
    "lora_alpha": ({"lora_alpha": None}, "must be a number"),
    "r=9": ({"r": 9}, "expected [9, 48]"),
    "has no tensors of it": ({"target_modules": ["q_proj", "o_proj"]}, "trained on this model"),
    "--max-lora-rank 8": ({"r": 65}, "raise it"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_are_refused_by_name(field: str, tmp_path: Path) -> None:
    changes, remedy = REFUSED[field]
    model = write_model(tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", model, targets=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError) as caught:
        load_adapter(load_model(tmp_path / "model", dtype="float32"), 0, folder, max_rank=9 if "9" in field else 8)
    assert field in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("family", "settings", "target", "reason"),
    [
        ("Llama", {}, "lm_head", "the head"),
        ("Mixtral", {"num_local_experts": 2}, "gate", "experts"),
        ("DeepseekV3", {"first_k_dense_replace": 3}, "kv_b_proj", "latent attention"),
        ("Qwen3Next", QWEN_3_NEXT, "conv1d", "convolutions"),
        ("Qwen3Next", QWEN_3_NEXT, "gate_proj", "experts"),
        ("Qwen3_5", QWEN_3_5, "conv1d", "convolutions"),
        ("NemotronH", NEMOTRON_H, "conv1d", "convolutions"),
        ("NemotronH", NEMOTRON_H, "up_proj", "experts"),
        ("NemotronH", NEMOTRON_H, "embeddings", "the embedding"),
    ],
)
def test_modules_that_can_t_be_adapted_are_refused_with_the_reason(
    family: str, settings: dict[str, Any], target: str, reason: str, tmp_path: Path
) -> None:
    heads = {"num_key_value_heads": 6} if family == "DeepseekV3" else {}
    model = write_model(tmp_path / "model", family, **settings, **heads)
    folder = write_adapter(tmp_path / "adapter", model, targets=[target])
    with pytest.raises(CheckpointError, match=reason):
        load_adapter(load_model(tmp_path / "model", dtype="float32"), 0, folder, max_rank=64)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    decoder = load_model(tmp_path / "model", dtype="float32")
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json; give the folder"):
        load_adapter(decoder, 0, tmp_path / "nowhere", max_rank=64)
    folder = write_adapter(tmp_path / "adapter", model)
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_adapter(decoder, 0, folder, max_rank=64)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safe_serialization=True"):
        load_adapter(decoder, 0, folder, max_rank=64)

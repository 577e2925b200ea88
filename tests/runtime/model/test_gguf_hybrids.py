"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them, are transformers' models."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from runtime_support.gguf_hybrid_writing import SMALL, split_inputs, write_hybrid_gguf
from runtime_support.paged_requests import PagedRequests
from runtime_support.reference_models import CLOSE, logits_of

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.weight_source import CodedSource
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.single_rank import SingleRank

QWEN: dict[str, Any] = {
    "std": 0.05,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}
QWEN_3_5 = QWEN | {"linear_value_head_dim": 32}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    "head_dim": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "ssm_state_size": 12,
    "n_groups": 2,
}
EXPERTS = NEMOTRON | {
    "layers_block_type": ["moe", "mamba", "attention", "moe", "mamba"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", QWEN),
    "qwen3-next of other sizes": (
        "Qwen3Next",
        QWEN
        | {"layer_types": [*["linear_attention"] * 2, "full_attention"], "num_hidden_layers": 3}
        | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "attention_bias": True, "linear_key_head_dim": 16},
    ),
    "qwen3.5": ("Qwen3_5", QWEN_3_5),
    "qwen3.5 of other sizes": (
        "Qwen3_5",
        QWEN | {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_conv_kernel_dim": 2},
    ),
    "qwen3.5 with one value head per key head": ("Qwen3_5", QWEN_3_5 | {"linear_num_key_heads": 4}),
    "qwen3.5 with experts": ("Qwen3_5Moe", QWEN_3_5 | {"linear_num_value_heads": 6}),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h of other sizes": (
        "NemotronH",
        NEMOTRON | {"n_groups": 1, "use_conv_bias": False, "mlp_bias": True, "use_bias": True, "conv_kernel": 3},
    ),
    "nemotron-h with experts": ("NemotronH", EXPERTS),
    "nemotron-h with groups of experts": (
        "NemotronH",
        EXPERTS | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    ),
}
Q8_0 = GGMLQuantizationType.Q8_0


def most_likely(model: Any, prompt: list[int], made: list[int]) -> list[int]:
    """The most likely token after the prompt, and after each of ``made`` but the last one: from a single pass."""
    return logits_of(model, prompt + made)[len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_same_model(decoder: Decoder, model: Any) -> None:
    tokens = list(range(1, 40))
    logits = PagedRequests(decoder).forward({"it": tokens})["it"]
    torch.testing.assert_close(logits, logits_of(model, tokens), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_has_the_logits_and_the_tokens_of_the_original(
    name: str, tmp_path: Path, model_of_blocks: Any
) -> None:
    family, changes = MODELS[name]
    model = model_of_blocks(family, **changes)
    decoder = load_model(write_hybrid_gguf(tmp_path / "model.gguf", model), dtype="float32")
    assert_same_model(decoder, model)
    prompts = {"first": [3, 1, 4, 1, 5], "second": list(range(20))}
    made = PagedRequests(decoder).continue_greedily(prompts, 64)
    assert made == {each: most_likely(model, prompt, made[each]) for each, prompt in prompts.items()}
    assert [len(tokens) for tokens in made.values()] == [64, 64]


def test_files_of_the_first_converter_have_the_inputs_in_one_tensor(tmp_path: Path, model_of_blocks: Any) -> None:
    model = model_of_blocks("Qwen3Next", **QWEN)
    assert_same_model(load_model(write_hybrid_gguf(tmp_path / "m.gguf", model, legacy=True), dtype="float32"), model)


def test_experts_may_have_gates_and_values_in_one_tensor(tmp_path: Path, model_of_blocks: Any) -> None:
    family, changes = MODELS["qwen3.5 with experts"]
    model = model_of_blocks(family, **changes)
    assert_same_model(load_model(write_hybrid_gguf(tmp_path / "m.gguf", model, fused=True), dtype="float32"), model)


def test_recurrent_layers_can_be_listed(tmp_path: Path, model_of_blocks: Any) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    model = model_of_blocks("Qwen3Next", **(QWEN | {"layer_types": kinds, "num_hidden_layers": 3}))

    def listed(writer: GGUFWriter) -> None:
        writer.add_array("qwen3next.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds])

    assert_same_model(
        load_model(write_hybrid_gguf(tmp_path / "m.gguf", model, metadata=listed), dtype="float32"), model
    )


def further(writer: GGUFWriter) -> None:
    """One more layer, which predicts further tokens."""
    (keys,) = writer.kv_data
    (prefix,) = {key.partition(".")[0] for key in keys if key.endswith(".block_count")}
    keys[f"{prefix}.block_count"].value += 1
    for name in ("attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys[f"{prefix}.{name}"].value, list):
            keys[f"{prefix}.{name}"].value.append(max(keys[f"{prefix}.{name}"].value))
    writer.add_nextn_predict_layers(1)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "nemotron-h with experts"])
def test_layers_that_predict_further_tokens_are_ignored(name: str, tmp_path: Path, model_of_blocks: Any) -> None:
    family, changes = MODELS[name]
    model = model_of_blocks(family, **changes)
    layer = model.config.num_hidden_layers
    extra = {f"blk.{layer}.{each}.weight": (2, 32) for each in ("nextn.eh_proj", "attn_norm", "ffn_up_exps")}
    path = write_hybrid_gguf(tmp_path / "model.gguf", model, metadata=further, extra=extra)
    assert inspect_checkpoint(path).config.prediction_layers == 1
    assert_same_model(load_model(path, dtype="float32"), model)


@torch.inference_mode()
def round_weights(model: Any, kind: GGMLQuantizationType) -> None:
    """Give the matrices that the file has quantized the values that it has."""
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1 and not SMALL.search(name):
            tensor.copy_(torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind)))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "changes", "place"),
    [
        ("qwen3-next", {}, "attention"),
        ("qwen3.5", {}, "attention"),
        ("nemotron-h with experts", {"head_dim": 16}, "mixer"),
    ],
)
def test_quantized_matrices_are_expanded_or_kept(
    name: str, changes: dict[str, Any], place: str, tmp_path: Path, model_of_blocks: Any
) -> None:
    family, settings = MODELS[name]
    model = model_of_blocks(family, **(settings | changes))
    round_weights(model, Q8_0)
    path = write_hybrid_gguf(tmp_path / "model.gguf", model, kind=Q8_0)
    expanded = load_model(path, dtype="float32")
    assert_same_model(expanded, model)
    kept = load_model(path, dtype="float32", quantized_weights="keep")
    expected, found = expanded.destinations(), kept.destinations()
    assert found.keys() == expected.keys()
    assert all(torch.equal(weights, expected[tensor]) for tensor, weights in found.items())
    assert kept.config.recurrent is not None
    sizes = {"inputs": 64, "output": kept.config.recurrent.values}
    for layer, part in itertools.product(kept.config.recurrent.layers, sizes):
        hidden = torch.randn(7, sizes[part], generator=torch.Generator().manual_seed(0))
        modules = [getattr(getattr(each.layers[layer], place), part) for each in (kept, expanded)]
        assert isinstance(modules[0], QuantizedLinear)
        made, exact = (module(hidden) for module in modules)
        assert not torch.equal(made, exact)
        assert float((made - exact).norm() / exact.norm()) < 0.02
    tokens = list(range(1, 40))
    logits = PagedRequests(kept).forward({"it": tokens})["it"]
    assert not torch.equal(logits, logits_of(model, tokens))
    assert torch.isfinite(logits).all()


def test_inputs_in_two_types_are_expanded(tmp_path: Path, model_of_blocks: Any) -> None:
    model = model_of_blocks("Qwen3Next", **QWEN)
    kinds = {"attn_qkv.weight": Q8_0, "attn_gate.weight": GGMLQuantizationType.F16}
    path = write_hybrid_gguf(tmp_path / "model.gguf", model, other_kinds=kinds)
    kept = load_model(path, dtype="float32", quantized_weights="keep").destinations()
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    mixed, gates = split_inputs(model.state_dict()[name], model.config)
    found, found_gates = kept[name].split([len(mixed), len(gates)])
    torch.testing.assert_close(found, mixed, atol=4e-3, rtol=0)
    torch.testing.assert_close(found_gates, gates.half().float(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("qwen3-next", {"ssm.inner_size": 97}, "qwen3next.ssm.inner_size is 97, expected a multiple of ssm.time_step"),
        ("qwen3-next", {"ssm.state_size": 0}, "key head dimension of a recurrent layer: 0, expected 1 to"),
        ("qwen3-next", {"ssm.group_count": None}, "qwen3next.ssm.group_count is missing. Convert the model again"),
        ("qwen3-next", {"attention.recurrent_layers": [True]}, "recurrent_layers is a list of 1, expected one for 4"),
        ("qwen3-next", {"full_attention_interval": 1}, "0 of 4 layers are recurrent, expected 1 to 3"),
        ("qwen3.5 with experts", {"expert_feed_forward_length": None}, "moe.expert_feed_forward_length is missing"),
        ("qwen3-next", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4, expected fewer than the 4 layers"),
        (
            "nemotron-h",
            {"feed_forward_length": [0, 9, 0, 0, 7]},
            "is 7 in one layer and 9 in another one, expected one",
        ),
        (
            "nemotron-h",
            {"feed_forward_length": [0, 9]},
            "feed_forward_length is [0, 9], expected 5 numbers of at least",
        ),
        (
            "nemotron-h",
            {"attention.head_count_kv": [0, 2, 2, 0, 0]},
            "is 96 in layer 1, which has attention, expected 0",
        ),
        ("nemotron-h", {"attention.head_count_kv": 2}, "which has attention, expected 0 where attention.head_count_kv"),
        ("nemotron-h with experts", {"moe_latent_size": 16}, "moe_latent_size is 16, only 0 is supported. Choose"),
        ("nemotron-h with experts", {"expert_gating_func": 1}, "h_moe.expert_gating_func is 1, only 2 is supported"),
        ("nemotron-h with experts", {"expert_group_count": 4}, "number of expert groups is 4, expected a divisor of 6"),
    ],
)
def test_metadata_that_can_not_be_served_is_named(
    name: str, keys: dict[str, Any], said: str, tmp_path: Path, model_of_blocks: Any
) -> None:
    family, changes = MODELS[name]

    def change(writer: GGUFWriter) -> None:
        (prefix,) = {key.partition(".")[0] for key in writer.kv_data[0] if key.endswith(".block_count")}
        for key, value in keys.items():
            writer.kv_data[0].pop(f"{prefix}.{key}", None)
            if isinstance(value, list):
                writer.add_array(f"{prefix}.{key}", value)
            elif value is not None:
                writer.add_uint32(f"{prefix}.{key}", value)

    path = write_hybrid_gguf(tmp_path / "model.gguf", model_of_blocks(family, **changes), metadata=change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "leave_out", "extra", "said"),
    [
        ("qwen3-next", "attn_gate.weight", {}, "layers.0.linear_attn.in_proj_qkvz.weight, .* missing"),
        ("qwen3-next", "ssm_a", {}, "tensors: model.layers.0.linear_attn.A_log, .* missing"),
        ("qwen3.5", "ssm_beta.weight", {}, "layers.0.linear_attn.in_proj_b.weight, .* missing"),
        ("nemotron-h", "ssm_norm.weight", {}, "backbone.layers.0.mixer.norm.weight, .* missing"),
        ("nemotron-h", "-", {"blk.1.ffn_gate.weight": (96, 64)}, "tensor blk.1.ffn_gate.weight found"),
        (
            "nemotron-h with experts",
            "-",
            {"blk.0.ffn_gate_exps.weight": (6, 32, 64)},
            "blk.0.ffn_gate_exps.weight found",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, leave_out: str, extra: dict[str, tuple[int, ...]], said: str, tmp_path: Path, model_of_blocks: Any
) -> None:
    family, changes = MODELS[name]
    model = model_of_blocks(family, **changes)
    path = write_hybrid_gguf(tmp_path / "model.gguf", model, leave_out=leave_out, extra=extra)
    with pytest.raises(CheckpointError, match=said):
        inspect_checkpoint(path)


def kept(source: CodedSource, name: str, rows: range, columns: slice) -> torch.Tensor:
    """The weights of a part that stays quantized."""
    coding = source.tensors[name].coding
    assert coding is not None
    (part,) = source.read_coded(name, rows, columns)
    matrix = QuantizedMatrix(len(rows), columns.stop - columns.start, coding)
    matrix.fill(0, part)
    return matrix.whole(torch.float32)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, Q8_0])
def test_parts_of_joined_inputs_are_read(kind: GGMLQuantizationType, tmp_path: Path, model_of_blocks: Any) -> None:
    model = model_of_blocks("Qwen3Next", **QWEN)
    round_weights(model, kind)
    source = inspect_checkpoint(write_hybrid_gguf(tmp_path / "model.gguf", model, kind=kind)).source
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    whole = model.state_dict()[name]
    assert (source.tensors[name].shape, source.tensors[name].kind) == (tuple(whole.shape), kind.name)
    assert source.tensors[name].num_bytes == whole.numel() * 34 // 32 if kind is Q8_0 else whole.numel() * 4
    for first, last in ((0, len(whole)), (5, 12), (12, 60), (37, 100), (100, 101), (96, len(whole))):
        part = torch.empty(last - first, 32)
        assert sum(source.read(name, part, (first, 32))) == part.numel()
        assert torch.equal(part, whole[first:last, 32:])
        if kind is Q8_0:
            assert isinstance(source, CodedSource)
            assert torch.equal(kept(source, name, range(first, last), slice(0, 64)), whole[first:last])


@pytest.mark.parametrize("kind", [Q8_0, GGMLQuantizationType.Q4_1])
def test_parts_of_reordered_columns_are_read(kind: GGMLQuantizationType, tmp_path: Path, model_of_blocks: Any) -> None:
    model = model_of_blocks("Qwen3_5", **QWEN_3_5)
    round_weights(model, kind)
    source = inspect_checkpoint(write_hybrid_gguf(tmp_path / "model.gguf", model, kind=kind)).source
    assert isinstance(source, CodedSource)
    name = "model.layers.2.linear_attn.out_proj.weight"
    part = torch.empty(40, 64)
    assert sum(source.read(name, part, (3, 32))) == part.numel()
    assert torch.equal(part, model.state_dict()[name][3:43, 32:96])
    assert torch.equal(kept(source, name, range(3, 43), slice(32, 96)), part)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5 with experts", "nemotron-h with experts"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_the_converted_model(name: str, rank: int, tmp_path: Path, model_of_blocks: Any) -> None:
    family, changes = MODELS[name]
    model = model_of_blocks(family, **changes)
    model.save_pretrained(tmp_path / "original")
    ranks = SingleRank()
    ranks.position = RankPosition(ParallelSizes(tensor=2), rank, 0)
    original, converted = (
        load_model(path, dtype="float32", ranks=ranks).state_dict()
        for path in (tmp_path / "original", write_hybrid_gguf(tmp_path / "model.gguf", model))
    )
    assert original
    assert original.keys() == converted.keys()
    torch.testing.assert_close(converted, original)

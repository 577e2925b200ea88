"""A model that several ranks divide has the answers of one rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import model_scenarios
from runtime_support.family_models import MINISTRAL_3_ROPE, PARTIAL
from runtime_support.model_scenarios import Answers
from runtime_support.rank_processes import run_ranks
from runtime_support.reference_models import assert_most_likely
from safetensors.torch import load_file, save_file
from suite_support.repetition import repeated
from suite_support.worker import free_port

from megatron_runtime.parallel.layout import ParallelSizes

WRITTEN_BY_MEGATRON = Path(__file__).parent.parent / "data" / "megatron"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 81,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 24}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "num_experts": 4}
NARROW = {"moe_intermediate_size": 23}
SHARED = {"shared_expert_intermediate_size": 37}
GLM_4_5 = NARROW | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = LATENT | {name: value for name, value in GLM_4_5.items() if name != "use_qk_norm"}
DEEPSEEK_V2 = LATENT | {"q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
LLAMA_4 = {
    "head_dim": 8,
    "intermediate_size": 23,
    "intermediate_size_mlp": 37,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 7,
    "no_rope_layer_interval": 2,
    "floor_scale": 4,
}
GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.5}
QWEN_3_5 = {
    "std": 0.1,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
QWEN_3_NEXT = EXPERTS | SHARED | QWEN_3_5 | {"moe_intermediate_size": 20}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "moe"],
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 5,
    "ssm_state_size": 6,
    "n_groups": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 37,
}
WITHOUT_EXPERTS = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    "use_bias": True,
    "mlp_bias": True,
    "n_groups": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with a tied head and biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "ministral 3": ("Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL_3_ROPE}),
    "falcon 3": ("Llama", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "phi-4-mini": ("Phi3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": PARTIAL}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", GEMMA | CAPS),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window_pattern": 2}),
    "gpt2": ("GPT2", {}),
    "gpt2 with a head of its own": ("GPT2", {"tie_word_embeddings": False, "n_inner": 57}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3 with experts": ("Qwen3Moe", EXPERTS | NARROW),
    "qwen3 with experts in some layers": ("Qwen3Moe", EXPERTS | NARROW | {"mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", EXPERTS | {"clip_qkv": 0.4}),
    "qwen2 with experts": ("Qwen2Moe", EXPERTS | NARROW | SHARED),
    "glm 4.5": ("Glm4Moe", GLM_4_5),
    "glm 4": ("Glm4", {"head_dim": 8}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "head_dim": 8}),
    "starcoder2": ("Starcoder2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 7}),
    "cohere": ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "minimax m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}),
    "llama 4": ("Llama4", LLAMA_4),
    "gpt-oss": ("GptOss", GPT_OSS),
    "deepseek v3": ("DeepseekV3", DEEPSEEK_V3),
    "deepseek v2": ("DeepseekV2", DEEPSEEK_V2 | NARROW),
    "qwen3-next": ("Qwen3Next", QWEN_3_NEXT),
    "qwen3.5": ("Qwen3_5", QWEN_3_5),
    "qwen3.5 with experts": ("Qwen3_5Moe", QWEN_3_NEXT),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h without experts": ("NemotronH", NEMOTRON_H | WITHOUT_EXPERTS),
}
WITH_SHARED_EXPERTS = ["qwen2 with experts", "glm 4.5", "deepseek v3"]
WITH_OTHER_EXPERTS = ["minimax m2", "llama 4", "gpt-oss"]
MIXTURES = ["mixtral", "qwen3 with experts", "olmoe", *WITH_SHARED_EXPERTS]
RECURRENT_MIXTURES = ["qwen3-next", "qwen3.5 with experts", "nemotron-h"]
RECURRENT = [*RECURRENT_MIXTURES, "qwen3.5", "nemotron-h without experts"]
"""Of nemotron-h, the first one of two stages has no attention, and the last one no recurrent layer."""
LAYOUTS: dict[str, tuple[ParallelSizes, list[str]]] = {
    "tensor 2": (ParallelSizes(tensor=2), list(MODELS)),
    "tensor 4, which share key heads": (
        ParallelSizes(tensor=4),
        ["llama", "olmo2", "gpt2", "phi3", "deepseek v2", "cohere", "gpt-oss", *RECURRENT_MIXTURES],
    ),
    "pipeline 2": (
        ParallelSizes(pipeline=2),
        ["llama with a tied head and biases", "gpt2", "gemma3", *MIXTURES, *RECURRENT],
    ),
    "pipeline 2, uneven": (ParallelSizes(pipeline=2, stage_layers=(1, 2)), ["llama", "smollm3", "gemma2"]),
    "pipeline 3": (ParallelSizes(pipeline=3), ["llama with a tied head and biases", "granite"]),
    "tensor 2, pipeline 2": (
        ParallelSizes(tensor=2, pipeline=2),
        ["llama", "gpt2 with a head of its own", "olmoe", *WITH_SHARED_EXPERTS, *RECURRENT],
    ),
    "expert 2": (
        ParallelSizes(tensor=2, expert=2),
        [*MIXTURES, "qwen3 with experts in some layers", *RECURRENT_MIXTURES],
    ),
    "expert 2 of 4": (ParallelSizes(tensor=4, expert=2), [*MIXTURES, *WITH_OTHER_EXPERTS]),
    "expert 4": (ParallelSizes(tensor=4, expert=4), MIXTURES),
    "expert 4, tensor 1": (
        ParallelSizes(expert=4),
        [*MIXTURES, "qwen3 with experts in some layers", *RECURRENT_MIXTURES],
    ),
    "expert 4, tensor 2": (ParallelSizes(tensor=2, expert=4), MIXTURES),
    "expert 8, tensor 1": (ParallelSizes(expert=8), ["glm 4.5", "deepseek v3"]),
    "expert 2, tensor 1, pipeline 2": (
        ParallelSizes(pipeline=2, expert=2),
        [*WITH_SHARED_EXPERTS, "mixtral", *RECURRENT_MIXTURES],
    ),
    "expert 4, tensor 2, pipeline 2": (ParallelSizes(tensor=2, pipeline=2, expert=4), WITH_SHARED_EXPERTS),
}
LONG, SHORT = repeated(24, 64), repeated(4, 64)
"""Steps of the first model of a layout and of those with shared experts, and of the others."""
OF_RECURRENT = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Any]) -> Callable[[str], Any]:
    """A model in MODELS, of transformers, and its checkpoint."""

    @cache
    def save(name: str) -> tuple[Any, Path]:
        family, settings = MODELS[name]
        path = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        return save_model(path, family, **(SIZES | settings)), path

    return save


@pytest.fixture(scope="module")
def folders(saved: Callable[[str], Any]) -> Callable[[str], Path]:
    """The checkpoint of a model in MODELS."""
    return lambda name: saved(name)[1]


@pytest.fixture(scope="module")
def alone(folders: Callable[[str], Path]) -> Callable[[str, int], Answers]:
    """The answers of one rank over this number of steps."""
    return cache(lambda name, steps: model_scenarios.answer(folders(name), steps=steps))


def assert_same(answers: list[Answers], expected: Answers, sizes: ParallelSizes, steps: int) -> None:
    for rank, answer in enumerate(answers):
        assert answer.tokens == {name: tokens[:steps] for name, tokens in expected.tokens.items()}
        if rank == sizes.position(0).sampler:
            torch.testing.assert_close(answer.logits, expected.logits, atol=1e-4, rtol=0.0)
        else:
            assert answer.logits is None


def steps_of(name: str, names: list[str]) -> int:
    if name in RECURRENT:
        return OF_RECURRENT
    return LONG if name in (names[0], *WITH_SHARED_EXPERTS) else SHORT


@pytest.mark.repetition
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_model_answer_as_one_rank_does(
    layout: str, folders: Callable[[str], Path], alone: Callable[[str, int], Answers]
) -> None:
    sizes, names = LAYOUTS[layout]
    steps = [steps_of(name, names) for name in names]
    models = list(zip(map(folders, names), steps, strict=True))
    answers = run_ranks(model_scenarios.answer_all, sizes.ranks_per_replica_group, sizes, free_port(), models)
    for index, name in enumerate(names):
        assert_same([answer[index] for answer in answers], alone(name, steps[index]), sizes, steps[index])


@pytest.mark.parametrize("name", RECURRENT)
def test_one_rank_with_recurrent_layers_answers_as_transformers_does(
    name: str, saved: Callable[[str], Any], alone: Callable[[str, int], Answers]
) -> None:
    made = alone(name, OF_RECURRENT).tokens
    for key, prompt in model_scenarios.PROMPTS.items():
        assert len(made[key]) == OF_RECURRENT
        assert_most_likely(saved(name)[0], prompt, made[key])


@pytest.mark.parametrize("sizes", [ParallelSizes(expert=2), ParallelSizes(tensor=2, expert=4)], ids=str)
def test_ranks_with_copies_of_the_dense_layers_choose_the_same_experts(
    sizes: ParallelSizes, folders: Callable[[str], Path]
) -> None:
    path = folders("glm 4.5")
    said = run_ranks(model_scenarios.choose_experts, sizes.ranks_per_replica_group, sizes, free_port(), path)
    first = said[0]["alone"]
    assert not said[-1]["alone"]["chosen"].equal(first["chosen"])
    for heard in said:
        assert heard["together"]["chosen"].equal(first["chosen"])
        assert heard["together"]["weights"].equal(first["weights"])


def save_two(folder: Path, save_model: Callable[..., Any], family: str, settings: dict[str, Any]) -> None:
    """Models of one configuration with different weights, in the folders 0 and 1."""
    for number, std in enumerate((0.2, 0.5)):
        save_model(folder / str(number), family, std=std, **(SIZES | settings))


def check_renewal(folder: Path, invalid: str, sizes: ParallelSizes) -> list[dict[str, Any]]:
    """Two ranks load the weights of model 1 in place of those of 0 in all ways, also after an ``invalid`` model.

    Returns what each rank says.
    """
    paths = [folder / name for name in ("0", "1", invalid)]
    old, new = (model_scenarios.answer(path, steps=SHORT) for path in paths[:2])
    said: list[dict[str, Any]] = run_ranks(model_scenarios.renew, 2, sizes, free_port(), *paths)
    for name in ("from files", "after a complaint", "brought back"):
        assert_same([heard[name] for heard in said], new, sizes, SHORT)
    assert_same([heard["by name"] for heard in said], old, sizes, SHORT)
    return said


def test_ranks_with_copies_of_the_dense_layers_load_new_weights(tmp_path: Path, save_model: Callable[..., Any]) -> None:
    save_two(tmp_path, save_model, "Glm4Moe", GLM_4_5)
    said = check_renewal(tmp_path, "nowhere", ParallelSizes(expert=2))
    assert ["lm_head.weight" in heard["shapes"] for heard in said] == [True, False]
    assert [heard["shapes"]["model.layers.0.mlp.up_proj.weight"] for heard in said] == [(81, 64)] * 2
    assert ["model.layers.1.mlp.experts.7.up_proj.weight" in heard["shapes"] for heard in said] == [False, True]


def test_ranks_load_their_parts_of_recurrent_layers_anew(tmp_path: Path, save_model: Callable[..., Any]) -> None:
    save_two(tmp_path, save_model, *MODELS["nemotron-h without experts"])
    said = check_renewal(tmp_path, "nowhere", ParallelSizes(tensor=2))
    # 8 heads of 5 channels on 2 groups with states of 6 channels.
    shapes = {name.removeprefix("backbone.layers.0.mixer."): shape for name, shape in said[0]["shapes"].items()}
    assert (shapes["A_log"], shapes["norm.weight"], shapes["conv1d.weight"]) == ((4,), (20,), (20 + 2 * 6, 1, 4))
    assert (shapes["in_proj.weight"], shapes["out_proj.weight"]) == ((20 + 32 + 4, 64), (64, 20))
    assert ["backbone.layers.0.mixer.out_proj.bias" in heard["shapes"] for heard in said] == [True, False]


def test_every_format_can_be_shared(
    tmp_path: Path, random_model: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    sizes = ParallelSizes(tensor=2)
    families = {"Llama": {}, "Gemma2": GEMMA | CAPS, "Mixtral": {"num_local_experts": 4}, "GptOss": GPT_OSS}
    models = {
        family: random_model(family, **(SIZES | {"head_dim": 8} | settings)) for family, settings in families.items()
    }
    paths = [write_gguf(tmp_path / f"{family}.gguf", model) for family, model in models.items()]
    for name in ("training", "experts", "experts_two_ranks", "latents_of_queries", "gpt2"):
        shutil.unpack_archive(WRITTEN_BY_MEGATRON / f"{name}.zip", tmp_path / name)
        paths.append(tmp_path / name)
    answers = run_ranks(model_scenarios.answer_all, 2, sizes, free_port(), [(path, SHORT) for path in paths])
    for index, path in enumerate(paths):
        expected = model_scenarios.answer(path, steps=SHORT)
        assert_same([answer[index] for answer in answers], expected, sizes, SHORT)


def test_ranks_load_their_part_of_new_weights_all_or_none(tmp_path: Path, save_model: Callable[..., Any]) -> None:
    save_two(tmp_path, save_model, "Llama", {})
    shutil.copytree(tmp_path / "0", tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1] = float("nan")  # of the last rank's rows alone
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    said = check_renewal(tmp_path, "broken", ParallelSizes(tensor=2))
    complaint = "numbers in tensor model.layers.1.mlp.up_proj.weight are NaN"
    assert "on another rank: " in said[0]["complaint"]
    assert all(complaint in heard["complaint"] for heard in said)
    assert all(heard["released"] == {"meta"} for heard in said)
    shapes = said[0]["shapes"]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 32)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (41, 64)
    assert shapes["model.embed_tokens.weight"] == (49, 64)

"""Live models of the released Megatron Core, served in place: the tokens are those of Megatron's own forward pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peer_support import megatron_core

DENSE = ["llama", "biases", "gpt2"]
EXPERTS = ["experts", "shared_experts", "sigmoid_routing"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The results of all checks: one process, since importing Megatron takes most of the time."""
    results: dict[str, Any] = json.loads(megatron_core.run("serve_live_models.py"))
    return results


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_the_tokens_are_those_of_megatron(found: dict[str, Any], name: str) -> None:
    assert found[name]["served"] == found[name]["expected"]
    assert len(set(found[name]["expected"])) > 2, "the answer has too few distinct tokens"


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_the_weights_are_shared_and_changed_by_training(found: dict[str, Any], name: str) -> None:
    assert found[name]["shared"]
    assert found[name]["served_after_training"] == found[name]["expected_after_training"] != found[name]["expected"]


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_layers_of_transformer_engine_have_other_names(found: dict[str, Any], name: str) -> None:
    assert found[name]["transformer_engine"] == found[name]["expected"]


def test_experts_in_one_matrix_are_shared_too(found: dict[str, Any]) -> None:
    assert found["experts"]["grouped"] == found["experts"]["expected"]


@pytest.mark.parametrize("how", ["module", "named"])
def test_another_live_model_becomes_the_weights_of_an_engine_without_a_copy(found: dict[str, Any], how: str) -> None:
    refit = found["refit"]
    assert refit[how] == refit["expected"] != refit["before"]
    assert refit["shared" if how == "module" else "shared_named"]
    assert refit["version"] == 1


def test_a_live_model_of_another_type_is_copied(found: dict[str, Any]) -> None:
    dtype, is_shared, _ = found["refit"]["copied"]
    assert (dtype, is_shared) == ("torch.float32", False)


def test_the_scripts_of_megatron_build_an_engine_for_the_live_model(found: dict[str, Any]) -> None:
    assert found["script"]["served"] == found["script"]["expected"]
    assert found["script"]["shared"]


def test_an_llm_accepts_the_live_model(found: dict[str, Any]) -> None:
    assert found["llm"]["tokens"] == found["llm"]["expected"]


def test_an_llm_with_a_coordinator_uses_the_trained_weights(found: dict[str, Any]) -> None:
    llm = found["llm"]
    assert llm["trained_tokens"] == llm["expected_after_training"] != llm["expected"]
    assert llm["version"] == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ranks", "tensor_model_parallel_size=2: a live model is served in place on one rank"),
        ("feature", "attention_output_gate=True"),
        ("tensor", "linear_qkv.bias is missing"),
        ("unused", "q_layernorm.weight is unknown"),
        ("no_model", "model is a Linear"),
        ("tokenizer", "tokenizer.json"),
        ("sizes", "num_kv_heads is 4, but 2"),
    ],
)
def test_the_error_names_an_unsupported_part(found: dict[str, Any], what: str, words: str) -> None:
    assert words in found["refusals"][what]


def test_weights_that_are_not_finite_are_refused(found: dict[str, Any]) -> None:
    assert "NaN" in found["refit"]["nan"]

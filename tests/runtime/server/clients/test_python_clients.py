"""The endpoint with clients in a separate Python environment: LlamaIndex, and lm-eval's tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from client_support import further_python

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.model


def test_llamaindex_chats_streams_calls_and_gets_structured_output(shared_pod: Any) -> None:
    printed = further_python.run("llamaindex_client.py", f"{shared_pod.http.base_url}/v1")
    found = json.loads(printed.splitlines()[-1])
    assert "Paris" in found["chat"]
    assert found["streamed"] == found["chat"]
    assert found["pieces"] > 3
    assert "Paris" in found["completed"]
    (call,) = found["calls"]
    assert call["name"] == "weather"
    assert found["result"] == f"It is sunny in {call['arguments']['city']}."
    assert found["structured"]["city"] in ("Paris", "Köln")


def test_lm_eval_scores_choices_as_transformers_does(
    shared_pod: Any, tmp_path: Path, reference_model: LlamaForCausalLM, reference_tokenizer: PreTrainedTokenizerFast
) -> None:
    url = f"{shared_pod.http.base_url}/v1/completions"
    further_python.run(
        *("-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "capitals"),
        *("--model_args", f"model=chat,base_url={url},num_concurrent=4,max_retries=1"),
        *("--include_path", "tasks", "--output_path", tmp_path, "--log_samples"),
        HF_HOME=str(tmp_path / "hf"),
    )
    (log,) = tmp_path.rglob("samples_capitals_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(samples) == 5
    for sample in samples:
        question = reference_tokenizer(sample["doc"]["question"])["input_ids"]
        for choice, (log_prob, is_likeliest) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            tokens = reference_tokenizer(f"{sample['doc']['question']} {choice}")["input_ids"]
            with torch.inference_mode():
                log_probs = reference_model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(question), len(tokens))
            expected = sum(float(log_probs[place - 1, tokens[place]]) for place in places)
            assert float(log_prob) == pytest.approx(expected, abs=1e-3)
            follows = all(int(log_probs[place - 1].argmax()) == tokens[place] for place in places)
            assert str(is_likeliest) == str(follows)
    (results,) = tmp_path.rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["capitals"]["acc,none"]
    assert accuracy >= 0.8, "SmolLM2 knows most of these"

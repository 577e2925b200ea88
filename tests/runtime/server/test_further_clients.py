"""The endpoint as clients use it that need an environment of their own: LlamaIndex, and lm-eval's tasks."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "tests" / "clients"
SECONDS = 150


@pytest.fixture(scope="module")
def interpreter(cache: Path) -> Path:
    """The Python that has these clients."""
    python: Path = runpy.run_path(str(CLIENTS / "prepare.py"))["prepare"](cache)
    return python


def run(*command: object, **environment: str) -> str:
    """What a client prints; on one thread, and away from the network."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "no_proxy": "*"}
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **quiet, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_llamaindex_chats_streams_calls_and_gets_structured_output(shared_pod: Any, interpreter: Path) -> None:
    printed = run(interpreter, CLIENTS / "llamaindex_client.py", f"{shared_pod.http.base_url}/v1")
    found = json.loads(printed.splitlines()[-1])
    assert "Paris" in found["chat"]
    assert found["streamed"] == found["chat"]
    assert found["pieces"] > 3
    assert "Paris" in found["completed"]
    ((call),) = found["calls"]
    assert call["name"] == "weather"
    assert found["result"] == f"It is sunny in {call['arguments']['city']}."
    assert found["structured"]["city"] in ("Paris", "Köln")


def test_lm_eval_scores_choices_as_transformers_does(
    shared_pod: Any,
    interpreter: Path,
    tmp_path: Path,
    reference_model: LlamaForCausalLM,
    reference_tokenizer: PreTrainedTokenizerFast,
) -> None:
    url = f"{shared_pod.http.base_url}/v1/completions"
    run(
        *(interpreter.with_name("lm_eval"), "run", "--model", "local-completions", "--tasks", "capitals"),
        *("--model_args", f"model=chat,base_url={url},num_concurrent=4,max_retries=1"),
        *("--include_path", CLIENTS / "tasks", "--output_path", tmp_path, "--log_samples"),
        HF_HOME=str(tmp_path / "hf"),
    )
    (log,) = tmp_path.rglob("samples_capitals_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(samples) == 5
    for sample in samples:
        for choice, told in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            question = reference_tokenizer(sample["doc"]["question"])["input_ids"]
            tokens = reference_tokenizer(f"{sample['doc']['question']} {choice}")["input_ids"]
            with torch.inference_mode():
                log_probs = reference_model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(question), len(tokens))
            expected = sum(float(log_probs[place - 1, tokens[place]]) for place in places)
            assert float(told[0]) == pytest.approx(expected, abs=1e-3)
            is_likeliest = all(int(log_probs[place - 1].argmax()) == tokens[place] for place in places)
            assert told[1] in (is_likeliest, str(is_likeliest))
    (results,) = tmp_path.rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["capitals"]["acc,none"]
    assert accuracy >= 0.8, "SmolLM2 knows most of these"

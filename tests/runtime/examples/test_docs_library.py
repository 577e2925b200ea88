"""The examples of the library in the docs run, as far as this environment has what they need."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.doc_blocks import DocBlock, doc_blocks
from suite_support.worker import free_port

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import FinishedRequestRecord
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

README, TRAINING = "README.md", "docs/reinforcement-learning.md"
ONLY_WITH_MEGATRON_CORE = "gpt_model"
"""Blocks with this name need Megatron Core: tests/runtime/peers serves live models in an environment that has it."""
PROMPT = [7, 3, 90, 4, 5]


def blocks(page: str) -> list[DocBlock]:
    return [block for block in doc_blocks("python") if block.page == page]


def the_block(name: str) -> DocBlock:
    """The block of the page on training that has this name."""
    (found,) = (block for block in blocks(TRAINING) if name in block.text)
    return found


def run(block: DocBlock, **names: Any) -> dict[str, Any]:
    """Runs a part of a program, which has these names; returns all names afterwards."""
    exec(compile(block.text, str(block), "exec"), names)
    return names


@pytest.mark.model
def test_the_programs_in_the_readme_print_answers(smollm2_path: Path) -> None:
    """In order, as one program: the second one uses the path of the first one. One rank stands for the three."""
    direct, over_ranks = (block.text for block in blocks(README))
    direct = direct.replace('path = "SmolLM2-135M-Instruct.Q4_1.gguf"', f"path = {str(smollm2_path)!r}")
    over_ranks = over_ranks.replace("tensor=3", "tensor=1")
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **world, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", direct + over_ranks],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *second = done.stdout.strip().splitlines()
    assert "100" in first
    assert second


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The parts of an engine of a mixture of experts that reports its routing."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("docs") / "tiny", experts=4)
    config = InferenceConfig(moe_enable_routing_replay=True, kv_cache_memory_bytes=1 << 24)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    return {"model": model, "tokenizer": tokenizer, "inference_config": config}


def test_a_trainer_takes_the_ledger(parts: dict[str, Any]) -> None:
    engine = DynamicInferenceEngine.build(parts["model"], parts["tokenizer"], parts["inference_config"])
    record = FinishedRequestRecord([(0, 1)], [(0, 1)], 0)
    engine.local_metadata_ledger = {"uid": record}
    assert run(the_block("local_metadata_ledger"), engine=engine)["ledger"] == {"uid": record}
    assert engine.local_metadata_ledger == {}


def test_the_scores_of_an_answer_are_those_of_its_generation(parts: dict[str, Any]) -> None:
    sampling = SamplingParams(num_tokens_to_generate=6, temperature=0, ignore_eos=True, return_log_probs=True)
    with MegatronLLM(**parts) as llm:
        (result,) = llm.generate(PROMPT, sampling)
        names = run(the_block("replayed_routing"), llm=llm, result=result, prompt=PROMPT, SamplingParams=SamplingParams)
    generated = names["scored"].prompt_log_probs[len(PROMPT) - 1 :]
    assert generated == pytest.approx(result.generated_log_probs, abs=1e-5)


@pytest.mark.parametrize("block", [each for each in blocks(TRAINING) if ONLY_WITH_MEGATRON_CORE in each.text], ids=str)
def test_the_imports_of_an_example_with_megatron_core_exist(block: DocBlock) -> None:
    imports = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert node.module is not None
        module = importlib.import_module(node.module)
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []

"""serve() over every kind of checkpoint that the library loads, in one process and under torchrun."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_support.megatron_checkpoint import megatron_state, save
from suite_support.worker import free_port
from transformers import LlamaForCausalLM

from megatron_runtime.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

EXAMPLE = Path(__file__).parents[3] / "examples" / "inference_server.py"
CONFIG = ServeConfig(host="127.0.0.1", port=0, frontend_replicas=1)
PROMPT = "Water"
LENGTH = 12


@pytest.fixture(scope="module", params=["hugging face", "torch_dist"])
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as Hugging Face saves it, and as a training of Megatron does: the latest iteration of a folder."""
    if request.param == "hugging face":
        return tiny_checkpoint
    folder = tmp_path_factory.mktemp("training")
    iteration = folder / "iter_0000010"
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    save(iteration, model, megatron_state(model, padded_vocab=320))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, iteration)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def parts_of(checkpoint: Path) -> dict[str, Any]:
    return {
        "model": load_model(checkpoint, dtype="float32"),
        "tokenizer": load_tokenizer(checkpoint),
        "inference_config": InferenceConfig(kv_cache_memory_bytes=8 * 2**20),
    }


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> str:
    greedy = SamplingParams(temperature=0, num_tokens_to_generate=LENGTH)
    return str(MegatronLLM(**parts_of(tiny_checkpoint)).generate(PROMPT, greedy)[0].generated_text)


def complete(url: str) -> str:
    body = {"model": "model", "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH}
    answer = httpx.post(f"{url}/completions", json=body, timeout=60, trust_env=False)
    return str(answer.json()["choices"][0]["text"])


def test_the_blocking_class_serves_a_checkpoint(checkpoint: Path, expected: str) -> None:
    with MegatronLLM(**parts_of(checkpoint), use_coordinator=True) as llm:
        llm.serve(CONFIG, blocking=False)
        assert llm.frontend_address is not None
        assert complete("http://{}:{}/v1".format(*llm.frontend_address)) == expected


async def test_the_async_class_serves_a_checkpoint(checkpoint: Path, expected: str) -> None:
    async with MegatronAsyncLLM(**parts_of(checkpoint), use_coordinator=True) as llm:
        await llm.serve(CONFIG, blocking=False)
        assert llm.frontend_address is not None
        url = "http://{}:{}/v1".format(*llm.frontend_address)
        assert await asyncio.to_thread(complete, url) == expected


@pytest.fixture
def torchrun(checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    """The example on two ranks that share the model."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    flags = ["--dtype", "float32", "--tensor-parallel", "2", "--buffer-size-gb", "0.01", "--port", str(free_port())]
    process = subprocess.Popen(
        [*command, str(checkpoint), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def test_the_ranks_of_torchrun_serve_a_checkpoint(torchrun: subprocess.Popen[str], expected: str) -> None:
    assert torchrun.stdout is not None
    line = next(line for line in torchrun.stdout if line.startswith("Serving on "))
    assert complete(line.removeprefix("Serving on ").strip()) == expected

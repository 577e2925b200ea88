"""vLLM's OpenAI server, started like by ``vllm serve``, with its engine in a separate process and a minimal model."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import torch
from safetensors.torch import save_file

from frontends.protocol import MODEL, FrontendDeployment, serve
from frontends.tokenizer import TOKEN, write_tokenizer

WIDTH = 64
POLL_SECONDS = 0.2
KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Temporary folders that must exist as long as this process."""


def write_model(folder: Path, vocabulary: int) -> None:
    """Writes a Llama of one layer with zero weights, for which ``TOKEN`` is always the most likely token."""
    layer = "model.layers.0"
    square = [f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"]
    square += [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = ["model.norm.weight", *(f"{layer}.{name}_layernorm.weight" for name in ("input", "post_attention"))]
    head = torch.zeros(vocabulary, WIDTH)
    head[TOKEN] = 1.0
    weights = {name: torch.zeros(WIDTH, WIDTH) for name in square} | {name: torch.ones(WIDTH) for name in norms}
    weights |= {"model.embed_tokens.weight": torch.ones(vocabulary, WIDTH), "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


async def deploy() -> FrontendDeployment:
    KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(KEPT[0].name)
    write_model(folder, write_tokenizer(folder))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = _start(folder, port)
    atexit.register(_end, server)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        while not await _is_up(session):
            if server.poll() is not None:
                raise RuntimeError(f"vLLM's server exited with {server.returncode}")
            await asyncio.sleep(POLL_SECONDS)
    return FrontendDeployment(server.pid, port)


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts it without a request log and with metrics, as ours."""
    options = {"model": folder, "served-model-name": MODEL, "host": "127.0.0.1", "port": port}
    values = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ["--enforce-eager", "--disable-uvicorn-access-log"]
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *values, *flags],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )


async def _is_up(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()


if __name__ == "__main__":
    serve(deploy, "vllm-cpu", "torch", "fastapi", "starlette", "uvicorn", "uvloop")

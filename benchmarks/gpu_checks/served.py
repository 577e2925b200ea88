"""A random checkpoint for a server, and a client that reads many streams at once."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from megatron_runtime.model.formats.expected_tensors import expected_tensors
from megatron_runtime.model.formats.hugging_face_config import hugging_face_config
from servers.server import MODEL
from servers.streams import Stream

LIMIT_SECONDS = 60.0
"""Until all answers have to be whole."""
_STD = 0.02
_TEXT = re.compile(rb'"text":"([t\d]*)"')


def write_llama(folder: Path, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> int:
    """Write a Llama of these sizes (fields of its config.json) with random weights; returns their bytes.

    The weights are drawn on ``device``. Each token's text is its number after a ``t``, so that texts are equal only if
    the tokens are.
    """
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "rms_norm_eps": 1e-5}
    fields |= {"torch_dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": True, **sizes}
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in expected_tensors(hugging_face_config(folder / "config.json")).items():
        drawn = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator, device=device) * _STD
        tensors[name] = drawn.to("cpu", dtype)
    save_file(tensors, folder / "model.safetensors")
    words = {f"t{token}": token for token in range(sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"}))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class Answers:
    """The tokens of some streams, and the seconds until the last one had ended."""

    tokens: list[list[bytes]]
    seconds: float
    interrupted_after: int = 0
    """Tokens of the stream that had the fewest when all were interrupted."""

    def require(self, tokens: int) -> Answers:
        """The same; raises ValueError if a stream has another number of tokens, or was interrupted too late."""
        if wrong := [len(each) for each in self.tokens if len(each) != tokens]:
            raise ValueError(f"{len(wrong)} of {len(self.tokens)} streams had {wrong[0]} of {tokens} tokens")
        if self.interrupted_after == tokens:
            raise ValueError(f"all answers of {tokens} tokens had ended before they were interrupted")
        return self


Action = Callable[[], object]


def read_answers(
    port: int, prompts: Sequence[list[int]], tokens: int, interruption: tuple[Action, Action] | None = None
) -> Answers:
    """Greedy answers of this length to all prompts at once, each a stream on a connection of its own.

    Without cached prefixes, so that an answer takes the same passes each time.

    Args:
        interruption: Called one after the other when every stream has begun; the seconds count from then.
    """
    return asyncio.run(_read_answers(port, prompts, tokens, interruption))


async def _read_answers(
    port: int, prompts: Sequence[list[int]], tokens: int, interruption: tuple[Action, Action] | None
) -> Answers:
    streams = [Stream(port) for _ in prompts]
    bodies = [_body(prompt, tokens) for prompt in prompts]
    fewest = 0
    try:
        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
            start = time.perf_counter()
            for stream, body in zip(streams, bodies, strict=True):
                group.create_task(stream.read(body))
            if interruption is not None:
                for stream in streams:
                    await stream.has_begun.wait()
                start = time.perf_counter()
                await asyncio.to_thread(interruption[0])
                fewest = min(len(_tokens(each)) for each in streams)
                await asyncio.to_thread(interruption[1])
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return Answers([_tokens(each) for each in streams], time.perf_counter() - start, fewest)


def _body(prompt: list[int], tokens: int) -> bytes:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(fields | {"stream": True, "cache_salt": uuid.uuid4().hex}).encode()


def _tokens(stream: Stream) -> list[bytes]:
    """Those that have arrived."""
    return re.findall(rb"t\d+", b"".join(_TEXT.findall(stream.body())))

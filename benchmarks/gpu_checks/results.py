"""Results of checks and measurements, and the sizes at which they run."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_runtime.model.config import ExpertsConfig, RoutingConfig
from peers.command_line import print_table

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    name: str
    value: str
    limit: str = ""
    """What a check demands; empty for a measurement."""
    is_wrong: bool = False


Check = tuple[str, Callable[[], Iterable[Result]]]
"""The name of some checks or measurements, and what runs them."""


def run(checks: Iterable[Check]) -> Iterator[Result]:
    """The results of all checks, also on stderr; one that fails with an error is wrong, and others run nevertheless."""
    for name, check in checks:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            for result in check():
                print(f"  {result.name}: {result.value}", file=sys.stderr, flush=True)
                yield result
        except Exception as error:
            yield failure(name, error)


def free_memory(*, has_gpu: bool) -> None:
    """That of what earlier checks have left."""
    gc.collect()
    if has_gpu:
        torch.cuda.empty_cache()


def failure(name: str, error: Exception) -> Result:
    """The row of a check that an error has ended."""
    traceback.print_exception(error)
    words = str(error).strip().splitlines() or [""]
    return Result(name, f"{type(error).__name__}: {words[0]:.80}", "no error", is_wrong=True)


@dataclass(frozen=True)
class Sizes:
    """Those of the measurements."""

    dtypes: tuple[torch.dtype, ...]
    """Of the checked kernels."""
    model: dict[str, Any]
    """Fields of ModelConfig."""
    mixture: dict[str, Any]
    """The same for a model with experts."""
    dtype: torch.dtype
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt: int
    """Tokens of the measured prefill."""
    copied_bytes: int
    cache_bytes: int
    """Of the engine that is suspended."""
    matrix: int
    repeats: int
    step_prompt: int = 256
    """Tokens of a prompt that is a step of its own."""
    step_slice: int = 128
    """Tokens of a prompt beside other requests."""
    step_requests: int = 31
    """These others."""
    max_requests: int = 256
    """Of their engine."""
    filling_prompt: int = 64
    """Tokens of the prompts of as many requests that fill a pass."""
    graph_tokens: int = 512
    """Of an engine's largest CUDA graph."""
    has_gpu: bool = True
    page: int = 16

    @property
    def vocabulary(self) -> int:
        """Of the model."""
        return int(self.model["vocab_size"])


_LLAMA_8B = {
    **{"architecture": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_layers": 32, "num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 5e5},
    **{"max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
_TINY = _LLAMA_8B | {
    **{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 256},
}
_QWEN_3_30B_A3B = {
    **{"architecture": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
    **{"num_layers": 48, "num_attention_heads": 32, "num_kv_heads": 4, "head_dim": 128, "rope_theta": 1e6},
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "query_key_norm": "head"},
    "experts": ExpertsConfig(128, 8, 768, RoutingConfig(normalize_weights=True)),
}
_TINY_MIXTURE = _TINY | {"architecture": "qwen3_moe", "query_key_norm": "head", "experts": ExpertsConfig(8, 2, 48)}
REAL = Sizes(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    model=_LLAMA_8B,
    mixture=_QWEN_3_30B_A3B,
    dtype=torch.bfloat16,
    batches=(1, 8, 32, 128, 256),
    contexts=(1024, 8192),
    prompt=8192,
    copied_bytes=4 << 30,
    cache_bytes=4 << 30,
    matrix=8192,
    repeats=20,
)
# Triton's interpreter multiplies bfloat16 wrongly.
TOY = Sizes(
    dtypes=(torch.float16,),
    model=_TINY,
    mixture=_TINY_MIXTURE,
    dtype=torch.float32,
    batches=(1, 2),
    contexts=(20,),
    prompt=20,
    copied_bytes=1 << 10,
    cache_bytes=1 << 20,
    matrix=16,
    repeats=1,
    step_prompt=16,
    step_slice=8,
    step_requests=2,
    max_requests=3,
    filling_prompt=8,
    graph_tokens=32,
    has_gpu=False,
)


def print_results(results: list[Result]) -> None:
    """One Markdown table."""
    rows = [
        [each.name, each.value, each.limit, "" if not each.limit else "WRONG" if each.is_wrong else "ok"]
        for each in results
    ]
    print_table([["check or measurement", "result", "limit", ""], *rows])


def device_name() -> str:
    """Of the card, with its memory and the versions."""
    properties = torch.cuda.get_device_properties(DEVICE)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, PyTorch {torch.__version__}"

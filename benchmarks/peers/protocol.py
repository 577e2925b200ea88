"""The protocol of all contenders: one JSON object per line, requests on stdin, one answer each on stdout.

    {"do": "load", "folder": ..., "work": ..., "dtype": ..., "threads": ..., "prompts": [[...]], "new_tokens": ...}
        -> {"versions": {"package": "1.2.3"}}
    {"do": "run", "new_tokens": n}    n at most the job's
        -> {"seconds": 1.5, "tokens": [[...]]}    the new tokens of each prompt, in order, exactly n of them

The process ends at the end of stdin, or after a failure with the traceback on stderr. This file and the peers require
only Python 3.11 and the peer itself; a peer's environment contains nothing of this project.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """The job of a contender."""

    folder: Path
    """Checkpoint in float32 in the format of transformers: config.json, model.safetensors. Or a GGUF file."""
    work: Path
    """Initially empty folder of the contender, for the checkpoint in its own format."""
    dtype: str
    """"float32", "bfloat16" or "float16": for weights, arithmetic and KV cache."""
    threads: int
    prompts: list[list[int]]
    """Token ids; all prompts have the same length."""
    new_tokens: int
    """Maximum number of new tokens per prompt."""

    @property
    def length(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return len(self.prompts[0]) + self.new_tokens


class Contender(Protocol):
    """An engine with the model loaded."""

    def run(self, new_tokens: int) -> list[list[int]]:
        """Computes all prompts from their beginning, greedily, ignoring the end-of-text token; returns the new tokens
        of each."""
        ...


class UnsupportedError(Exception):
    """This contender does not support the job."""


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of these distributions."""
    return {package: importlib.metadata.version(package) for package in packages}


def choose(dtype: str, known: dict[str, str]) -> str:
    """The contender's name of a dtype.

    Raises:
        UnsupportedError: It has none.
    """
    if dtype not in known:
        raise UnsupportedError(f"--dtype {dtype} is not supported here; use one of {', '.join(known)}")
    return known[dtype]


def serve(load: Callable[[Job], Contender], *packages: str) -> None:
    """Answers requests until stdin ends; ``packages`` are the distributions whose versions affect the results."""
    loaded: list[Contender] = []

    def start(**request: Any) -> dict[str, object]:
        request |= {name: Path(request[name]) for name in ("folder", "work")}
        loaded[:] = [load(Job(**request))]
        return {"versions": versions(*packages)}

    def run(new_tokens: int) -> dict[str, object]:
        if not loaded:
            raise ValueError("'run' came before 'load'")
        return _timed(loaded[0], new_tokens)

    answer_requests({"load": start, "run": run})


def answer_requests(actions: Mapping[str, Callable[..., dict[str, object]]]) -> None:
    """Answers each line of stdin with the action named by its "do", until stdin ends; redirects other output to
    stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("do")](**request)), file=answers, flush=True)


def _timed(contender: Contender, new_tokens: int) -> dict[str, object]:
    started = time.perf_counter()
    tokens = contender.run(new_tokens)
    return {"seconds": time.perf_counter() - started, "tokens": tokens}

"""What every contender speaks: one JSON object a line, requests on stdin, answers on stdout, one answer each.

    {"do": "load", "folder": ..., "work": ..., "dtype": ..., "threads": ..., "prompts": [[...]], "new_tokens": ...}
        -> {"versions": {"package": "1.2.3"}}
    {"do": "run", "new_tokens": n}    n at most the job's
        -> {"seconds": 1.5, "tokens": [[...]]}    the new tokens of each prompt, in order, exactly n of them

The end of stdin ends the process. A failure ends it too, with the traceback on stderr. This file and the peers beside
it need Python 3.11 and what the peer itself brings; nothing of this project is in a peer's environment.
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
    """What a contender is asked to do."""

    folder: Path
    """Checkpoint in float32 as transformers writes it: config.json, model.safetensors."""
    work: Path
    """Folder of the contender's own, empty at first, for the checkpoint in a format of its own."""
    dtype: str
    """"float32", "bfloat16" or "float16": of weights, arithmetic and KV cache."""
    threads: int
    prompts: list[list[int]]
    """Token ids, all prompts of one length."""
    new_tokens: int
    """Most new tokens of a prompt in any run."""

    @property
    def length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return len(self.prompts[0]) + self.new_tokens


class Contender(Protocol):
    """An engine with the model loaded."""

    def run(self, new_tokens: int) -> list[list[int]]:
        """All prompts from their beginning, greedily, the end-of-text token ignored: the new tokens of each."""
        ...


class UnsupportedError(Exception):
    """This contender can't do the job as asked."""


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of these distributions."""
    return {package: importlib.metadata.version(package) for package in packages}


def choose(dtype: str, known: dict[str, str]) -> str:
    """The contender's own name of a dtype.

    Raises:
        UnsupportedError: It has none.
    """
    if dtype not in known:
        raise UnsupportedError(f"--dtype {dtype} is not to be had here; choose one of {', '.join(known)}")
    return known[dtype]


def serve(load: Callable[[Job], Contender], *packages: str) -> None:
    """Answer requests until stdin ends; ``packages`` are the distributions whose versions a result depends on."""
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
    """Answer each line of stdin by the action that its "do" names, until stdin ends; what others print is kept away."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(actions[request.pop("do")](**request)), file=answers, flush=True)


def _timed(contender: Contender, new_tokens: int) -> dict[str, object]:
    started = time.perf_counter()
    tokens = contender.run(new_tokens)
    return {"seconds": time.perf_counter() - started, "tokens": tokens}

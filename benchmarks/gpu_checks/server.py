"""A whole server as a process: its speed over HTTP, the memory that it gives back, and its answers after failures."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runtime_support.processes import children_of

import megatron_runtime
from gpu_checks.results import DEVICE, Check, Result, Sizes, failure, free_memory
from gpu_checks.served import read_answers, write_llama
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT
from offline_throughput import make_prompts
from servers.server import CONTROL_TOKEN, HOST, Start, our_server

ROOT = Path(__file__).parents[2]
NEEDED = 0.95
START_SECONDS = 120.0
GIBIBYTE = 2**30
USED = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class ServerSizes:
    """Those of the server and its requests."""

    model: dict[str, Any]
    """Fields of config.json."""
    dtype: torch.dtype
    streams: tuple[int, ...]
    """Numbers of requests whose speed is measured."""
    prompt: int
    tokens: int
    """Of each measured answer."""
    long_tokens: int
    """Of answers that are interrupted."""
    killed: int
    """Streams when the rank is killed."""
    others: int
    """Requests beside the one whose answer must not change."""
    threads: int
    has_gpu: bool
    options: tuple[tuple[str, object], ...] = ()
    """Further ones of the command line."""


_LLAMA_1B = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096},
}
_TINY = _LLAMA_1B | {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}
REAL = ServerSizes(
    model=_LLAMA_1B,
    dtype=torch.bfloat16,
    streams=(1, 32, 128),
    prompt=128,
    tokens=256,
    long_tokens=1024,
    killed=32,
    others=64,
    threads=4,
    has_gpu=True,
)
TOY = ServerSizes(
    model=_TINY,
    dtype=torch.float32,
    streams=(1, 2),
    prompt=8,
    tokens=16,
    long_tokens=400,
    killed=2,
    others=3,
    threads=1,
    has_gpu=False,
    options=(("frontend-replicas", 1), ("batch-invariant", True)),  # one server, for all rows
)


def checks(sizes: Sizes) -> Iterator[Check]:
    """All of a server; on a GPU of a second one with ``--batch-invariant`` too."""
    yield "server", partial(measure, REAL if sizes.has_gpu else TOY)


def measure(sizes: ServerSizes) -> Iterator[Result]:
    """All rows; one that says so where packages of the server are missing."""
    if missing := missing_packages():
        named = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        yield Result("server", f"not measured: {named}; pip install '.[runtime]'")
        return
    free_memory(has_gpu=sizes.has_gpu)
    with tempfile.TemporaryDirectory() as name:
        served = ServedModel(Path(name), sizes)
        with served.start(**{"offload-weights": True}) as start:
            yield Result("server: ready", f"{ready(start):.3g} s from exec to the first answer")
            for count in sizes.streams:
                yield _row(f"server: streams, {count}", partial(served.measure_speed, start, count))
            yield from served.suspend(start)
            yield _row("server: KV cache beyond the memory", served.start_too_large)
            yield _row("server: killed rank", partial(served.kill_rank, start))
            if not sizes.has_gpu:
                yield _row("server: an answer among others", partial(served.compare_among_others, start))
        if sizes.has_gpu:
            with served.start(**{"batch-invariant": True}) as start:
                ready(start)
                yield _row("server: an answer among others", partial(served.compare_among_others, start))


def _row(name: str, work: Callable[[str], Result]) -> Result:
    try:
        return work(name)
    except Exception as error:
        return failure(name, error)


def missing_packages() -> list[str]:
    """Those of the extra ``runtime`` that this environment lacks."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [re.split(r"[^\w.-]", each)[0] for each in extras["runtime"]]
    return [name for name in names if next(iter(importlib.metadata.distributions(name=name)), None) is None]


def ready(start: Start) -> float:
    """Seconds from exec to the first answer."""
    return start.seconds_until(start.answers, START_SECONDS)


def send_signal(start: Start, word: str) -> float:
    """Send a signal to the control API; returns the seconds until it was carried out."""
    connection = http.client.HTTPConnection(HOST, start.control_port, timeout=START_SECONDS)
    begun = time.perf_counter()
    try:
        connection.request("POST", f"/v1/{word}?wait=true", headers={"Authorization": f"Bearer {CONTROL_TOKEN}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{word}: {answer.status} {answer.read()[:200].decode(errors='replace')}")
    finally:
        connection.close()
    return time.perf_counter() - begun


def used_bytes() -> int:
    """Memory of the first visible GPU that is in use by all processes, as nvidia-smi reports it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    done = subprocess.run([*USED, "-i", first], capture_output=True, text=True, timeout=START_SECONDS, check=True)
    return int(done.stdout) * 2**20


class ServedModel:
    """A random checkpoint in a folder, and what is demanded of the servers that serve it."""

    def __init__(self, folder: Path, sizes: ServerSizes) -> None:
        self._folder, self._sizes, self._checkpoint = folder, sizes, folder / "checkpoint"
        self._checkpoint.mkdir()
        device = DEVICE if sizes.has_gpu else torch.device("cpu")
        self._weights = write_llama(self._checkpoint, sizes.model, sizes.dtype, device)
        self._cache = 2**26
        if sizes.has_gpu:
            torch.cuda.empty_cache()
            self._cache = min(16 * GIBIBYTE, torch.cuda.get_device_properties(DEVICE).total_memory // 4)

    def start(self, name: str = "log", cache: int | None = None, **options: object) -> Start:
        """A server that is to be started, whose log has this name."""
        from megatron_runtime.launch.identity import TERMINATION_LOG_VARIABLE  # needs packages of the server

        path = [str(Path(megatron_runtime.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_INTERPRET": "0"}
        environment |= {TERMINATION_LOG_VARIABLE: str(self._folder / f"{name}.end")}
        options |= {"kv-cache-memory": cache or self._cache, **dict(self._sizes.options)}
        options |= {"device": "cuda" if self._sizes.has_gpu else "cpu"}
        return Start(our_server(self._checkpoint, environment, **options), self._sizes.threads, self._folder / name)

    def measure_speed(self, start: Start, count: int, name: str) -> Result:
        """The tokens per second of so many streams, after a few tokens of each that are not measured."""
        prompts, tokens = self._prompts(count), self._sizes.tokens
        read_answers(start.port, prompts, 4)
        answers = read_answers(start.port, prompts, tokens).require(tokens)
        return Result(name, f"{count * tokens / answers.seconds:,.0f} tokens/s", "all answered")

    def suspend(self, start: Start) -> Iterator[Result]:
        """Pause, suspend and resume while an answer is generated: the memory, and the answer."""
        seconds: dict[str, float] = {}
        used: list[int] = []

        def send(*words: str) -> None:
            for word in words:
                seconds[word] = send_signal(start, word)
                if self._sizes.has_gpu:
                    used.append(used_bytes())

        prompts, tokens = self._prompts(1), self._sizes.long_tokens
        name = "server: answer around a suspension"
        try:
            whole = read_answers(start.port, prompts, tokens).require(tokens)
            actions = (partial(send, "pause", "suspend", "resume"), partial(send, "unpause"))
            parts = read_answers(start.port, prompts, tokens, actions).require(tokens)
        except Exception as error:
            yield failure(name, error)
            for word in ("resume", "unpause"):  # the next rows need a server that runs
                with contextlib.suppress(Exception):
                    send_signal(start, word)
            return
        yield _same(name, whole.tokens[0], parts.tokens[0], f", {parts.interrupted_after} of them before it")
        yield self._memory(used, ", ".join(f"{word} {seconds[word]:.2g} s" for word in ("suspend", "resume")))

    def _memory(self, used: list[int], times: str) -> Result:
        name, size = "server: memory given back", self._weights + self._cache
        if not used:
            return Result(name, f"not measured without a GPU; {times}")
        return judge_memory(name, size, used[0] - used[1], used[2] - used[1], times)

    def start_too_large(self, name: str) -> Result:
        """A second server beside the first one, with a KV cache smaller than the GPU, but larger than what is free."""
        cache = 2**50
        if self._sizes.has_gpu:
            free, total = torch.cuda.mem_get_info(DEVICE)
            cache = (free + total - 8 * GIBIBYTE) // 2
        begun = time.perf_counter()
        with self.start("too large", cache) as start:
            code = start.exit_code(START_SECONDS)
            seconds = time.perf_counter() - begun
            end = self._folder / "too large.end"
            message = json.loads(end.read_text())["message"] if end.exists() else "no message"
            return judge_refusal(name, code, message, start.log(), seconds)

    def kill_rank(self, start: Start, name: str) -> Result:
        """The seconds until all streams have ended after a SIGKILL of the rank."""
        (rank,) = (pid for pid, command in children_of(start.pid).items() if "megatron_runtime.rank" in command)
        count, tokens = self._sizes.killed, self._sizes.long_tokens
        actions = (lambda: os.kill(rank, signal.SIGKILL), lambda: None)
        answers = read_answers(start.port, self._prompts(count), tokens, actions).require(tokens)
        return Result(name, f"all {count} streams whole {answers.seconds:.3g} s after it", "all answered")

    def compare_among_others(self, start: Start, name: str) -> Result:
        """The answer to one request alone, and among others."""
        prompts, tokens = self._prompts(1 + self._sizes.others), self._sizes.tokens
        alone = read_answers(start.port, prompts[:1], tokens).require(tokens)
        among = read_answers(start.port, prompts, tokens).require(tokens)
        return _same(name, alone.tokens[0], among.tokens[0], f", alone and among {self._sizes.others} others")

    def _prompts(self, count: int) -> list[list[int]]:
        return make_prompts(count, self._sizes.prompt, self._sizes.model["vocab_size"])


def judge_memory(name: str, size: int, given_back: int, taken: int, times: str) -> Result:
    """Of ``size`` bytes of KV cache and weights, those that suspend has given back and resume has taken again."""
    words = f"{given_back / size:.1%} of {size / 1e9:.3g} GB, {taken / size:.1%} taken again; {times}"
    return Result(name, words, f"{NEEDED:.0%}", is_wrong=min(given_back, taken) < NEEDED * size)


def judge_refusal(name: str, code: int, message: str, log: str, seconds: float) -> Result:
    """A start has to end with the code of invalid input, a message with the size and the remedy, and no restart."""
    is_named = re.search(r"(?is)kv.cache.*\d.*; (use|lower) ", message) is not None
    restarts = log.count("restarting it")
    words = f"exit code {code} after {seconds:.2g} s, {restarts} restarts: {message:.70}"
    is_wrong = code != EXIT_BAD_INPUT or not is_named or restarts > 0
    return Result(name, words, "code 2, size and remedy, no restart", is_wrong=is_wrong)


def _same(name: str, expected: list[bytes], found: list[bytes], rest: str) -> Result:
    differences = [place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    words = f"other tokens from the {differences[0] + 1}. on" if differences else f"the same {len(found)} tokens"
    return Result(name, words + rest, "the same", is_wrong=bool(differences))

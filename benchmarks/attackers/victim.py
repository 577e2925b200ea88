"""A client that asks at a steady rate beside an attack, and the server's processes meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from peers.turns import quantile
from servers.server import HOST, MODEL, PROMPT

EVERY_SECONDS = 0.2
SAMPLE_SECONDS = 0.05
TIMEOUT_SECONDS = 120.0
PAGE = 4096
TOKENS = 4
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
MIB = 1 << 20
PROMPTS, PROMPT_TOKENS = 8, 1000
PLAIN_TOKENS = 200
"""The token ids below are no special tokens in any of the models."""
FULL_ROUNDS = 3


@dataclass
class Answers:
    """What the client got: ``seconds`` of each answer, and the texts; None for none. ``steps`` has the mean seconds
    between two tokens of each answer."""

    seconds: list[float] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, later: Answers) -> None:
        """Count the answers to later questions, too."""
        self.seconds += later.seconds
        self.texts += later.texts
        self.steps += later.steps

    @property
    def step(self) -> float:
        """The mean over all answers: the time of a step of the engine in which the client takes part."""
        return statistics.fmean(self.steps) if self.steps else 0.0

    def quantile(self, share: float) -> float:
        """The time within which ``share`` of the answers came, in seconds."""
        return quantile(self.seconds, share)

    def wrong(self, right: str) -> int:
        """The number of answers that are missing or differ from the right one."""
        return sum(text != right for text in self.texts)


def ask_steadily(port: int, seconds: float) -> Answers:
    """Asks every EVERY_SECONDS, independent of the answers before, and waits for all of them."""
    answers = Answers()

    def ask(due: float) -> None:
        time.sleep(max(0.0, due - time.monotonic()))
        text, step = _streamed_answer(port)
        answers.seconds.append(time.monotonic() - due)
        answers.texts.append(text)
        if text is not None:
            answers.steps.append(step)

    began = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        for number in range(max(1, round(seconds / EVERY_SECONDS))):
            threads.submit(ask, began + number * EVERY_SECONDS)
    return answers


def use_all_memory(port: int, launcher: int) -> None:
    """Asks with new prompts until the server grows no more: the memory of its KV cache is no growth by an attack."""
    before, full = 0, 0
    while full < FULL_ROUNDS:
        prompts = [[random.randrange(PLAIN_TOKENS) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
        _ask(connection, {"prompt": prompts})
        connection.getresponse().read()
        connection.close()
        now = sum(memory(tree(launcher)).values())
        full = full + 1 if now - before < MIB else 0
        before = max(before, now)


def _streamed_answer(port: int) -> tuple[str | None, float]:
    """The text of an answer, or None, and the mean seconds between its tokens."""
    texts: list[str] = []
    times: list[float] = []
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    try:
        _ask(connection, {"stream": True})
        answer = connection.getresponse()
        while line := answer.readline():
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                texts.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])
    except (OSError, http.client.HTTPException, LookupError):
        return None, 0.0
    finally:
        connection.close()
    if answer.status != 200 or not times:
        return None, 0.0
    return "".join(texts), (times[-1] - times[0]) / (TOKENS - 1)


def _ask(connection: http.client.HTTPConnection, fields: Mapping[str, object]) -> None:
    body = json.dumps(BODY | dict(fields))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})


class Watch:
    """A context that observes the resident memory of processes."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self.before = memory(tree(self._launcher))
        self._modules = {process: module(process) for process in self.before}
        self.peak = dict(self.before)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._sampler.join()
        self.after = memory(tree(self._launcher))

    def growth(self) -> int:
        """The largest growth of one process, in bytes."""
        return max(self._growths().values())

    def most_grown(self) -> str:
        """The name of the module that the process with the largest growth runs."""
        growths = self._growths()
        return self._modules[max(growths, key=growths.__getitem__)]

    def remaining(self) -> int:
        """The largest growth of one process at the end, in bytes."""
        return max(self.after.get(process, 0) - before for process, before in self.before.items())

    def ended(self) -> int:
        """The number of processes that ended."""
        return len(self.before.keys() - self.after.keys())

    def _growths(self) -> dict[int, int]:
        return {process: self.peak[process] - before for process, before in self.before.items()}

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            for process, taken in memory(self.before).items():
                self.peak[process] = max(self.peak[process], taken)


def tree(root: int) -> list[int]:
    """The process and all that descend from it."""
    found = [root]
    for process in found:
        try:
            threads = list(Path(f"/proc/{process}/task").iterdir())
            found += [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


def module(process: int) -> str:
    """The last part of the name of the module that a process runs."""
    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    return words[words.index("-m") + 1].rsplit(".", 1)[-1] if "-m" in words else words[0]


def memory(processes: Iterable[int]) -> dict[int, int]:
    """The resident memory of each process that exists, in bytes."""
    found = {}
    for process in processes:
        try:
            found[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return found

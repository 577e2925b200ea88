"""A client that asks at a steady rate beside an attack, and the server's processes meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from servers.server import HOST, MODEL, PROMPT

EVERY_SECONDS = 0.2
SAMPLE_SECONDS = 0.05
TIMEOUT_SECONDS = 120.0
PAGE = 4096
BODY = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0})


@dataclass
class Answers:
    """What the client got: ``seconds`` of each answer, and the texts; None for none."""

    seconds: list[float] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """The time within which ``share`` of the answers came, in seconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def wrong(self, right: str) -> int:
        """The number of answers that are missing or differ from the right one."""
        return sum(text != right for text in self.texts)


def ask_steadily(port: int, seconds: float) -> Answers:
    """Asks every EVERY_SECONDS, independent of the answers before, and waits for all of them."""
    answers = Answers()

    def ask(due: float) -> None:
        time.sleep(max(0.0, due - time.monotonic()))
        text = _answer(port)
        answers.seconds.append(time.monotonic() - due)
        answers.texts.append(text)

    began = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        for number in range(max(1, round(seconds / EVERY_SECONDS))):
            threads.submit(ask, began + number * EVERY_SECONDS)
    return answers


def _answer(port: int) -> str | None:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        words = answer.read()
        return json.loads(words)["choices"][0]["text"] if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Watch:
    """A context that observes the resident memory of processes."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self.before = memory(tree(self._launcher))
        self.peak = dict(self.before)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._sampler.join()
        self.after = memory(tree(self._launcher))

    def growth(self) -> int:
        """The largest growth of one process, in bytes."""
        return max(self.peak[process] - before for process, before in self.before.items())

    def remaining(self) -> int:
        """The largest growth of one process at the end, in bytes."""
        return max(self.after.get(process, 0) - before for process, before in self.before.items())

    def ended(self) -> int:
        """The number of processes that ended."""
        return len(self.before.keys() - self.after.keys())

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


def memory(processes: Iterable[int]) -> dict[int, int]:
    """The resident memory of each process that exists, in bytes."""
    found = {}
    for process in processes:
        try:
            found[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return found

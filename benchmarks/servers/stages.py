"""The stages of our start, observed through its log, its processes and its control API."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers.server import CONTROL_TOKEN, HOST, Start

_CONTROL = re.compile(r"control API on http://[^:]+:(\d+)")
_INSPECTED = re.compile(r"weights .*, up to \d+ tokens")

STAGES = {
    "checkpoint inspected": "the preflight has accepted the checkpoint",
    "frontend listens": "the first frontend answers GET /health",
    "ranks started": "the process of the first rank runs, and has torch",
    "load begins": "the rank has read the first piece of a tensor",
    "weights read": "all tensors are dequantized and have their final data type",
    "engine built": "weights are packed, kernels and tokenizer are loaded",
    "ready": "GET /ready is 200",
    "first answer": "a completion of one token is answered",
}
"""Stages in the order of the output; the frontends start in parallel with the ranks."""


def watch_stages(start: Start) -> dict[str, float]:
    """Seconds from the exec to each of STAGES."""
    found: dict[str, float] = {}

    def note(stage: str, has_happened: Callable[[], bool]) -> None:
        found[stage] = start.seconds_until(has_happened)

    watches = [
        threading.Thread(target=note, args=args, daemon=True)
        for args in (
            ("ranks started", lambda: _has_rank(start.pid)),
            ("checkpoint inspected", lambda: _INSPECTED.search(start.log()) is not None),
            ("frontend listens", lambda: start.status("GET", "/health") == 200),
        )
    ]
    watches.append(threading.Thread(target=_follow_rank, args=(start, found), daemon=True))
    for watch in watches:
        watch.start()
    note("ready", lambda: start.status("GET", "/ready") == 200)
    note("first answer", start.answers)
    for watch in watches:
        watch.join()
    return {stage: found[stage] for stage in STAGES}


def _has_rank(pid: int) -> bool:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any("megatron_runtime.rank" in Path(f"/proc/{child}/cmdline").read_text() for child in children)
    except OSError:
        return False


def _follow_rank(start: Start, found: dict[str, float]) -> None:
    """Polls the control API until the rank has loaded."""
    start.seconds_until(lambda: _CONTROL.search(start.log()) is not None)
    match = _CONTROL.search(start.log())
    assert match is not None
    revision = 0
    while "engine built" not in found:
        state = _state(int(match[1]), revision)
        revision, seconds = state["revision"], time.monotonic() - start.began
        for rank in state["ranks"]:
            if rank["totalBytes"]:
                found.setdefault("load begins", seconds)
            if rank["totalBytes"] and rank["loadedBytes"] == rank["totalBytes"]:
                found.setdefault("weights read", seconds)
            if rank["phase"] in ("Registering", "Serving"):
                found.setdefault("engine built", seconds)


def _state(port: int, after: int) -> Any:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request(
            "GET", f"/v1/state?after={after}&timeout=5", headers={"Authorization": f"Bearer {CONTROL_TOKEN}"}
        )
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()

"""Manifests of pods that run as processes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 30

WEB_SERVER = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path != "/readyz" or pathlib.Path(os.environ["READY_FILE"]).exists()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(os.environ["POD_NAME"].encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler).serve_forever()
"""

WEB = {
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "dummy"}, "ports": [{"port": 8000, "targetPort": "http"}]},
}
"""The Service of such pods."""


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Polls the condition; fails with ``what``."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.02)
    return value


def pod(code: str, name: str = "dummy", **container: Any) -> dict[str, Any]:
    """The manifest of a pod that runs this Python code."""
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20}
    main = {"name": "main", "command": [sys.executable, "-c", code], **container}
    return {"metadata": {"name": name, "labels": {"app": "dummy"}}, "spec": {**spec, "containers": [main]}}


def web_pod(name: str, ready_file: Path, **container: Any) -> dict[str, Any]:
    """A pod with an HTTP server that is ready while the file exists."""
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "READY_FILE", "value": str(ready_file)},
    ]
    probe = {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    ports = [{"name": "http", "containerPort": 8000}]
    return pod(WEB_SERVER, name, env=env, ports=ports, readinessProbe=probe, **container)

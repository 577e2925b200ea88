"""A server with S3's API on loopback: moto's, from the Python environment of the clients.

Its requirements exclude those of the Kubernetes client, so that it is not among the tests' libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from obstore.store import S3Store
from suite_support.worker import free_port

TESTS = Path(__file__).parents[1]
for folder in (TESTS / "cluster", TESTS / "runtime" / "server" / "clients"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for client_support; pytest's importlib mode does not add it

from client_support import further_python  # noqa: E402

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class ObjectServer:
    """``environment`` are the variables for clients."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1"}

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Stores the objects, by the library that the runtime uses."""
        store = S3Store(
            bucket,
            access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region=KEYS["AWS_REGION"],
            endpoint=self.url,
            client_options={"allow_http": True, "proxy_excludes": "127.0.0.1"},
        )
        for name, content in objects.items():
            store.put(name, content)


@contextmanager
def object_server(*buckets: str) -> Iterator[ObjectServer]:
    """A server with these buckets."""
    server = ObjectServer(free_port())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = ("-H", "127.0.0.1", "-p", server.url.rpartition(":")[2])
    command = [further_python.find(os.environ), "-m", "moto.server", *place]
    with server_process(command, environment, lambda client: client.get(f"{server.url}/moto-api/")):
        with httpx.Client(trust_env=False) as client:
            for bucket in buckets:
                client.put(f"{server.url}/{bucket}").raise_for_status()
        yield server


@contextmanager
def server_process(
    command: Sequence[str | Path], environment: Mapping[str, str], greet: Callable[[httpx.Client], object]
) -> Iterator[None]:
    """Runs a server during the block, which begins when ``greet`` reaches it."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, greet)
        yield
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], greet: Callable[[httpx.Client], object]) -> None:
    deadline = time.monotonic() + 60
    with httpx.Client(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                greet(client)
            except httpx.TransportError:
                time.sleep(0.1)
            else:
                return
    raise AssertionError(f"{process.args} did not start (exit code {process.poll()})")

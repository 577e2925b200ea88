"""Who may use a standalone server: keys, a certificate, and the token of the control API."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import trustme

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--threads-per-rank", "1", "--frontend-replicas", "1")


class Server(NamedTuple):
    """A standalone server."""

    log: str
    tokens: list[str]
    url: str
    authority: ssl.SSLContext
    """Trusts the server's certificate."""


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an API key and a certificate, started with nothing else."""
    folder = tmp_path_factory.mktemp("access")
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(folder / "key.pem")
    pair.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    command = [sys.executable, "-m", "megatron_runtime.cli", "--model", str(tiny_checkpoint), *FLAGS]
    command += ["--port", "0", "--control-port", "0", "--metrics-port", "0", "--coordinator-port", "0"]
    command += ["--api-key", "first-key", "--api-key", "second-key"]
    command += ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    log = folder / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            printed = ""
            while (found := re.search(r"https://127\.0\.0\.1:\d+", printed)) is None:
                printed += next(lines)
            tokens = re.findall(r"^token of the control API .*: (\S+)$", printed, re.MULTILINE)
            context = ssl.create_default_context()
            authority.configure_trust(context)
            yield Server(log.read_text(), tokens, found[0], context)
        finally:
            process.terminate()


def test_the_openai_endpoint_requires_one_of_the_keys_and_uses_https(server: Server) -> None:
    with httpx.Client(base_url=server.url, verify=server.authority, trust_env=False, timeout=60) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer third-key"}).status_code == 401
        for key in ("first-key", "second-key"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http{server.url.removeprefix('https')}/v1/models", trust_env=False, timeout=60)


def test_the_control_api_requires_the_token_that_is_printed_once(server: Server) -> None:
    (token,) = server.tokens
    control = re.search(r"control API on (http://127\.0\.0\.1:\d+)", server.log)
    assert control is not None
    assert token not in server.log
    with httpx.Client(base_url=control[1], trust_env=False, timeout=60) as client:
        assert client.post("/v1/pause").status_code == 401
        assert client.post("/v1/pause", headers={"Authorization": "Bearer first-key"}).status_code == 401
        authorized = {"Authorization": f"Bearer {token}"}
        assert client.post("/v1/pause", headers={**authorized, "Origin": server.url}).status_code == 403
        assert client.post("/v1/pause", headers=authorized).status_code == 202
        assert client.get("/healthz").status_code == 200

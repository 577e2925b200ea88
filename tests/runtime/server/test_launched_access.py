"""Who may use a server: keys, a certificate, and the token of the control API."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


@pytest.fixture(scope="module")
def keyed_pod(
    pod_type: type[Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """A pod whose API keys are in a file, and the file; each test writes its keys."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text("no-key-of-a-test\n")
    pod = pod_type(folder, "--model", str(tiny_checkpoint), *FLAGS, MEGATRON_API_KEYS_FILE=str(keys))
    try:
        yield pod.wait_ready(), keys
    finally:
        pod.end()


def write_keys(keys: Path, text: str) -> None:
    time.sleep(0.01)  # so that the file's modification time changes
    keys.write_text(text)


def status(pod: Any, key: str) -> int:
    """The status of a request with the key."""
    return int(pod.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code)


def test_api_keys_from_a_file_are_required_and_reloaded(keyed_pod: tuple[Any, Path]) -> None:
    pod, keys = keyed_pod
    write_keys(keys, "# people\nfirst-key\n")
    refused = pod.http.get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (status(pod, "first-key"), status(pod, "second-key")) == (200, 401)
    write_keys(keys, "second-key\n")
    assert (status(pod, "first-key"), status(pod, "second-key")) == (401, 200)
    assert pod.http.get("/health").status_code == 200


def test_a_frontend_killed_while_the_key_file_is_missing_restarts_when_it_exists(
    keyed_pod: tuple[Any, Path], tmp_path: Path
) -> None:
    pod, keys = keyed_pod
    write_keys(keys, "the-key\n")
    assert status(pod, "the-key") == 200
    restarts = pod.state()["restarts"]
    keys.rename(tmp_path / "away")
    assert status(pod, "the-key") == 200
    os.kill(pod.child("server.frontend"), signal.SIGKILL)
    pod.wait_for(lambda state: state["restarts"] >= restarts + 2)
    assert f"{keys}: can't be read" in pod.words()
    (tmp_path / "away").rename(keys)
    pod.wait_ready()
    assert status(pod, "the-key") == 200

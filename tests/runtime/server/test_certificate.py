"""The certificate of the HTTP port: real handshakes, renewed files, and clear errors."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from fastapi import FastAPI
from runtime_support.http_servers import serving

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.certificate import Certificate
from megatron_runtime.server.http_server import HttpServer
from megatron_runtime.server.options import HttpOptions


class Files:
    """The files of a certificate, as cert-manager and the kubelet renew them."""

    def __init__(self, folder: Path) -> None:
        self.cert = folder / "tls.crt"
        self.key = folder / "tls.key"
        self.trusted = ssl.create_default_context()
        """Trusts the authority of the newest certificate alone."""
        self.renew()

    def renew(self) -> None:
        """Write a certificate of a new authority."""
        authority = trustme.CA()
        pair = authority.issue_cert("127.0.0.1")
        self.trusted = ssl.create_default_context()
        authority.configure_trust(self.trusted)
        for path, content in ((self.cert, pair.cert_chain_pems[0]), (self.key, pair.private_key_pem)):
            content.write_to_path(path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def certificate(files: Files) -> Certificate:
    return Certificate(files.cert, files.key)


@pytest.fixture
def server(certificate: Certificate) -> HttpServer:
    """A server with the certificate."""
    app = FastAPI()

    @app.get("/")
    async def read() -> str:
        return "served"

    return HttpServer(app, certificate=certificate)


@pytest.fixture
async def url(server: HttpServer) -> AsyncIterator[str]:
    """Of the server, which runs."""
    async with serving(server) as (host, port):
        yield f"https://{host}:{port}"


async def read(url: str, trusted: ssl.SSLContext) -> str:
    """Over a new connection."""
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
        return str((await client.get(url)).json())


async def test_new_connections_use_a_renewed_certificate(certificate: Certificate, files: Files, url: str) -> None:
    first = files.trusted
    assert await read(url, first) == "served"
    files.renew()
    certificate.refresh()
    assert await read(url, files.trusted) == "served"
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await read(url, first)


async def test_an_unusable_renewal_leaves_the_last_certificate_in_use(
    certificate: Certificate, files: Files, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    files.key.with_suffix(".new").write_text("not a key")
    files.key.with_suffix(".new").replace(files.key)
    certificate.refresh()
    assert await read(url, files.trusted) == "served"
    assert "the last certificate stays in use" in caplog.text
    files.key.unlink()
    certificate.refresh()
    assert await read(url, files.trusted) == "served"
    files.renew()
    certificate.refresh()
    assert await read(url, files.trusted) == "served"


async def test_a_connection_whose_handshake_ends_after_a_handover_began_is_served_and_closed(
    server: HttpServer, files: Files, url: str
) -> None:
    early = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
    assert await read(url, files.trusted) == "served"  # accepted after the other one
    server.hand_over()
    while server.servers[0].is_serving():  # noqa: ASYNC110  # the server has no event for it
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(sock=early, ssl=files.trusted, server_hostname="127.0.0.1")
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert (answer.startswith(b"HTTP/1.1 200 "), b"connection: close" in answer) == (True, True)


def test_an_unusable_certificate_is_refused_with_the_flag_and_the_reason(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-key .*nowhere: can't be read: No such file"):
        Certificate(files.cert, tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"--tls-cert .*tls.key.*: not a PEM certificate and its key"):
        Certificate(files.key, files.cert)
    other = trustme.CA().issue_cert("127.0.0.1").private_key_pem
    other.write_to_path(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"not a PEM certificate and its key: KEY_VALUES_MISMATCH"):
        Certificate(files.cert, tmp_path / "other")
    locked = serialization.load_pem_private_key(files.key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked").write_bytes(locked)
    with pytest.raises(ConfigurationError, match=r"--tls-key .*locked: has a passphrase"):
        Certificate(files.cert, tmp_path / "locked")


def test_a_certificate_needs_a_key() -> None:
    with pytest.raises(ConfigurationError, match="--tls-cert a: give --tls-key too"):
        HttpOptions(tls_cert="a").check()
    with pytest.raises(ConfigurationError, match="--tls-key b: give --tls-cert too"):
        HttpOptions(tls_key="b").check()

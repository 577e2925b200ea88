"""Access to the coordinator's socket: CURVE keys derived from one shared secret, or loopback only."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from megatron_runtime.errors import ConfigurationError

KEY_VARIABLE = "MEGATRON_COORDINATOR_KEY"
"""The environment variable with the shared secret of the coordinator."""
SHORTEST_SECRET = 32
_DOMAIN = "megatron-coordinator"


@dataclass(frozen=True)
class CurveKeys:
    """Both key pairs, Z85 encoded; the shared secret determines all of them."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def key_environment(key: str | None) -> dict[str, str]:
    """The environment that passes the key to a child process."""
    return {} if key is None else {KEY_VARIABLE: key}


def derive_keys(secret: str) -> CurveKeys:
    """The same two CURVE key pairs from the same secret, by HMAC-SHA256 with one label per pair.

    Raises:
        ConfigurationError: The secret has fewer than 32 characters.
    """
    if len(secret) < SHORTEST_SECRET:
        raise ConfigurationError(
            f"the coordinator key has {len(secret)} characters; give at least {SHORTEST_SECRET} random ones "
            f"({KEY_VARIABLE})",
            field="key",
        )
    server, client = (_private_key(secret, label) for label in ("server", "client"))
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def _private_key(secret: str, label: str) -> bytes:
    digest = hmac.new(secret.encode(), f"{_DOMAIN}/{label}".encode(), hashlib.sha256).digest()
    return z85.encode(digest)


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine only; names other than localhost count as reachable from others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def coordinator_address(address: int | str) -> str:
    """``tcp://host:port`` from a port of this machine, ``host:port`` or the whole address.

    Raises:
        ConfigurationError: None of these forms.
    """
    if isinstance(address, int):
        address = f"tcp://127.0.0.1:{address}"
    if "://" not in address:
        address = f"tcp://{address}"
    try:
        parts = urlsplit(address)
        whole = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        whole = False
    if not whole:
        raise ConfigurationError(
            f"inference_coordinator_address={address!r} is not an address; use a port, host:port or tcp://host:port",
            field="inference_coordinator_address",
        )
    return address


def require_key_or_loopback(host: str, key: str | None) -> None:
    """Allow plain sockets on loopback addresses only.

    Raises:
        ConfigurationError: There is no key, and the host is reachable from other machines.
    """
    if key is None and not is_loopback(host):
        raise ConfigurationError(
            f"without a coordinator key only loopback addresses are allowed, not {host!r}: set {KEY_VARIABLE}, "
            "or use 127.0.0.1",
            field="key",
        )


def secure_server(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], key: str) -> ThreadAuthenticator:
    """Enable CURVE on a server socket for clients with the same secret. The caller stops the returned authenticator."""
    keys = derive_keys(key)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, _OnlyClient(keys.client_public))
    socket.zap_domain = _DOMAIN.encode()
    socket.curve_server = True
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    return authenticator


def secure_client(socket: zmq.Socket[Any], key: str) -> None:
    """Enable CURVE on a client socket for the server with the same secret; call it before connecting."""
    keys = derive_keys(key)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


class _OnlyClient:
    """Credentials provider of the authenticator: accepts one key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == _DOMAIN and hmac.compare_digest(key, self._public_key)

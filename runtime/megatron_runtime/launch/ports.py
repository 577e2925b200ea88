"""The ports of a pod: their flags and default numbers."""

from __future__ import annotations

import socket

from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.server.listening_socket import bind

HTTP_PORT = 8000
CONTROL_PORT = 9000
METRICS_PORT = 9001
COORDINATOR_PORT = 5557
RENDEZVOUS_PORT = 29500
"""Port of a replica group's first pod for the rendezvous of ranks in several pods; there is no flag for it."""
LOOPBACK = "127.0.0.1"


def bind_http(options: LaunchOptions) -> socket.socket:
    """The socket of the OpenAI endpoint; raises ConfigurationError, as all of these."""
    return _bind(options, options.http_host, options.port, HTTP_PORT, "--port")


def bind_control(options: LaunchOptions) -> socket.socket:
    """The socket of the control API."""
    return _bind(options, options.private_host, options.control_port, CONTROL_PORT, "--control-port")


def bind_metrics(options: LaunchOptions) -> socket.socket:
    """The socket of the metrics, which need no token, so that a network can admit others than to the control API."""
    return _bind(options, options.private_host, options.metrics_port, METRICS_PORT, "--metrics-port")


def bind_coordinator(options: LaunchOptions) -> socket.socket:
    """A probe of the coordinator's port: the coordinator binds it itself."""
    return _bind(options, options.private_host, options.coordinator_port, COORDINATOR_PORT, "--coordinator-port")


def free_loopback_port() -> int:
    """A free port of LOOPBACK; another process may bind it before it is used."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _bind(options: LaunchOptions, host: str, port: int | None, usual: int, flag: str) -> socket.socket:
    return bind(host, port, usual, flag=flag, may_move=options.identity.is_standalone)

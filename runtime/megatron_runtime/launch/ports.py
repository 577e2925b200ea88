"""The ports of a pod: which flag names each, and where it is unless that flag says otherwise."""

from __future__ import annotations

import socket

from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.server.listening_socket import bind

HTTP_PORT = 8000
CONTROL_PORT = 9000
COORDINATOR_PORT = 5557
RENDEZVOUS_PORT = 29500
"""Of a group's first pod, where the ranks of a group of several pods meet; no flag names it."""
LOOPBACK = "127.0.0.1"


def bind_http(options: LaunchOptions) -> socket.socket:
    """For the OpenAI endpoint; raises ConfigurationError as all of these."""
    return _bind(options, options.http_host, options.port, HTTP_PORT, "--port")


def bind_control(options: LaunchOptions) -> socket.socket:
    """For the control API."""
    return _bind(options, options.private_host, options.control_port, CONTROL_PORT, "--control-port")


def bind_coordinator(options: LaunchOptions) -> socket.socket:
    """Only to see that it can be had, and which one: the coordinator binds it itself."""
    return _bind(options, options.private_host, options.coordinator_port, COORDINATOR_PORT, "--coordinator-port")


def free_loopback_port() -> int:
    """A port of LOOPBACK that nobody listens at; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _bind(options: LaunchOptions, host: str, port: int | None, usual: int, flag: str) -> socket.socket:
    return bind(host, port, usual, flag=flag, may_move=options.identity.is_standalone)

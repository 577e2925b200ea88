"""Hosts on one machine: network namespaces on a separate switch, whose cables can be pulled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_HERE = "/proc/thread-self/ns/net"


class CannotMakeHosts(Exception):
    """This machine does not allow it; ``str()`` is the reason in one line."""


class Host:
    """A namespace, in which a thread can run code."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._outside: list[int] = []

    def __enter__(self) -> Host:
        self._outside.append(os.open(_HERE, os.O_RDONLY))
        inside = os.open(_NAMESPACES / self.name, os.O_RDONLY)
        try:
            _enter(inside)
        finally:
            os.close(inside)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        outside = self._outside.pop()
        try:
            _enter(outside)
        finally:
            os.close(outside)


class Switch:
    """Connects hosts until ``close``, which removes them; their processes must have ended by then.

    Raises:
        CannotMakeHosts: Namespaces or links can't be created here.
    """

    def __init__(self, hosts: int) -> None:
        self._name = f"megatron-{os.getpid()}"
        self._made: list[str] = []
        self.hosts = [Host(f"{self._name}-{number}", f"10.77.0.{1 + number}") for number in range(hosts)]
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise CannotMakeHosts("network namespaces need root and the program ip")
        try:
            self._make()
        except CannotMakeHosts:
            self.close()
            raise

    def cut(self, host: Host) -> None:
        """Pulls the host's cable."""
        self._switch("link", "set", _port(host), "down")

    def restore(self, host: Host) -> None:
        """Reconnects it."""
        self._switch("link", "set", _port(host), "up")

    def close(self) -> None:
        """Removes everything."""
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], check=False, capture_output=True)

    def _make(self) -> None:
        for name in (self._name, *(host.name for host in self.hosts)):
            _ip("netns", "add", name)
            self._made.append(name)
        self._switch("link", "add", "bridge", "type", "bridge")
        self._switch("link", "set", "bridge", "up")
        for host in self.hosts:
            self._switch("link", "add", _port(host), "type", "veth", "peer", "cable", "netns", host.name)
            self._switch("link", "set", _port(host), "master", "bridge")
            self._switch("link", "set", _port(host), "up")
            for command in (
                ("address", "add", f"{host.address}/24", "dev", "cable"),
                ("link", "set", "cable", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-netns", host.name, *command)

    def _switch(self, *words: str) -> None:
        _ip("-netns", self._name, *words)


def _port(host: Host) -> str:
    return f"port{host.name.rpartition('-')[2]}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotMakeHosts(f"ip {' '.join(words)}: {' '.join(done.stderr.split())}")


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise CannotMakeHosts(f"setns: {os.strerror(ctypes.get_errno())}")

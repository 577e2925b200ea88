"""The process of a `ForkServer`."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import select
import socket
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import setproctitle

from megatron_runtime.processes.fork_server import LONGEST_MESSAGE, MAX_DESCRIPTORS
from megatron_runtime.processes.parent_link import BEAT_SECONDS, EXIT_DRAINED, ParentLink
from megatron_runtime.processes.spawning import command_line, pipe

_PID_BYTES = 8


@dataclass(frozen=True)
class _Request:
    """What a child runs. The first two descriptors are its standard input and its output."""

    options: dict[str, Any]
    environment: dict[str, str]
    names: list[str]
    descriptors: list[int]


def main() -> None:
    """Forks children until the launcher closes the connection or ends; in a child, runs the child's ``main``."""
    setproctitle.getproctitle()  # It finds the memory of the command line, before imports change the environment.
    link = ParentLink.from_arguments()
    with socket.socket(fileno=link.options["requests"]) as requests:
        module = _import(json.loads(requests.recv(LONGEST_MESSAGE))["module"])
        request = _serve(requests, link)
    if request is None:
        sys.exit(EXIT_DRAINED)
    link.close()
    _become(request, module)


def _import(name: str) -> ModuleType:
    """Imports the module of the children.

    Nearly all of the million objects created here are permanent: freezing them keeps the garbage collector of the
    children from scanning them, and so from copying the memory that they share.
    """
    gc.disable()
    module = importlib.import_module(name)
    if hasattr(module, "preload"):
        module.preload()
    gc.freeze()
    return module


def _serve(requests: socket.socket, link: ParentLink) -> _Request | None:
    """Returns the request in a child, and None in the server at the end of the connection."""
    while True:
        link.beat()
        if not select.select([requests], [], [], BEAT_SECONDS)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(
            requests, LONGEST_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not message:
            return None
        try:
            pid = _fork()
        except OSError as error:
            requests.send(json.dumps({"error": error.errno}).encode())
        else:
            if pid is None:
                fields = json.loads(message)
                return _Request(fields["options"], fields["environment"], fields["descriptors"], descriptors)
            requests.send(json.dumps({"pid": pid}).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork() -> int | None:
    """Forks a child that the kernel moves to the launcher, because the process between them ends.

    Returns its id, and None in the child, when its parent is the launcher.

    Raises:
        OSError: A process can't be forked.
    """
    (told, tell), (moved, move) = pipe(), pipe()
    with told, tell, moved, move:
        between = os.fork()
        if between == 0:
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or errno.EAGAIN)
            if pid == 0:
                os.setpgid(0, 0)
                move.close()
                moved.read()  # until the process between has ended, and the server has closed its end
                return None
            tell.write(pid.to_bytes(_PID_BYTES, "big", signed=True))
            os._exit(EXIT_DRAINED)
        os.waitpid(between, 0)
        pid = int.from_bytes(told.read(_PID_BYTES), "big", signed=True)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


def _become(request: _Request, module: ModuleType) -> None:
    """Makes this process what it would be as ``python -m module``."""
    stdin, output, *inherited = request.descriptors
    for descriptor, standard in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(stdin)
    os.close(output)
    os.environ.update(request.environment)
    options = request.options | dict(zip(request.names, inherited, strict=True))
    command = command_line(module.__name__, options)
    setproctitle.setproctitle(" ".join(command))
    sys.argv = [str(module.__file__), command[-1]]
    gc.enable()
    module.main()


if __name__ == "__main__":
    main()

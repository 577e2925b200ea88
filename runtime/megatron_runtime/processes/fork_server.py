"""Starts child processes that take long to import their modules: forked from one that has imported them (Linux)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TextIO

from megatron_runtime.processes.child import ChildTask
from megatron_runtime.processes.hang_detection import SilenceLimits
from megatron_runtime.processes.parent_link import set_process_attribute
from megatron_runtime.processes.spawning import INTERPRETERS, Command, Spawner
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildLife

LONGEST_MESSAGE = 128 * 1024
"""Bytes of a message; that of a single argument of a program, by which children without a fork server are limited."""
MAX_DESCRIPTORS = 8
_MODULE = "megatron_runtime.processes.fork_server_process"
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """One process that imports the modules of a kind of children, and forks such children on request.

    A child starts in some milliseconds instead of the time of its imports, which for torch is two seconds of a core,
    and shares their memory with the others. Like a child that is started directly, it is a child of this process, and
    the kernel kills it when the thread that called ``start`` ends. It does not depend on the fork server: a fork
    server that has ended is replaced before the next child starts.

    Call it from a permanent thread. This process becomes the parent of orphaned descendants, and waits for those of the
    children.

    Args:
        role: Names the process in the log.
        module: Has the ``main()`` of the children, and may have ``preload()``, which imports what ``main`` needs later.
        environment: Changes to the environment that take effect at the start of a process, or at an import.
        hang_timeout: Seconds without a heartbeat after which the fork server counts as hung, and is killed.
        start_timeout: The same for its start with the imports.
    """

    def __init__(
        self,
        role: str,
        module: str,
        environment: Mapping[str, str],
        *,
        hang_timeout: float = HANG_SECONDS,
        start_timeout: float = math.inf,
        log: TextIO | None = None,
    ) -> None:
        self._role = role
        self._module = module
        self._environment = dict(environment)
        self._limits = SilenceLimits(hang_timeout), SilenceLimits(start_timeout)
        self._log = log
        self._connection: socket.socket | None = None
        self._pending: deque[asyncio.Future[ForkedProcess]] = deque()
        self._life: asyncio.Task[str] | None = None

    @staticmethod
    def is_available() -> bool:
        """Whether this system can move a process to another parent, and wait for it (Linux 5.3)."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            return False
        return True

    def start(self) -> None:
        """Start the process, unless it runs; it begins with its imports."""
        if self._connection is not None:
            return
        adopt_orphans()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        self._connection.send(json.dumps({"module": self._module}).encode())
        asyncio.get_running_loop().add_reader(self._connection, self._receive)
        self._life = asyncio.create_task(self._live(theirs))
        self._life.add_done_callback(partial(self._clean_up, theirs))

    async def spawn(self, command: Command) -> ForkedProcess:
        """Fork a child. Raises OSError if that fails."""
        assert command.module == self._module, f"{command.module} is not the module of the {self._role}"
        try:
            forked = self._request(command)
        except ConnectionError:  # It has ended just now.
            assert self._life is not None
            await asyncio.wait({self._life})
            forked = self._request(command)
        return await forked

    async def close(self) -> None:
        """End the process, and with it the children that are about to start; others continue. Idempotent."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    async def _live(self, theirs: socket.socket) -> str:
        """Returns the message of the end."""
        descriptors = {"requests": theirs.fileno()}
        task = ChildTask(self._role, _MODULE, environment=self._environment, descriptors=descriptors)
        life = ChildLife(task, lambda _: None, self._log, *self._limits)
        return (await life.run(lambda _: theirs.close())).message

    def _clean_up(self, theirs: socket.socket, life: asyncio.Task[str]) -> None:
        """A callback, because a task that is cancelled before it begins runs nothing."""
        assert self._connection is not None
        theirs.close()
        self._receive()
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self._connection = None
        message = f"the {self._role} was ended" if life.cancelled() else life.result()
        while self._pending:
            if not (forked := self._pending.popleft()).done():
                forked.set_exception(ChildProcessError(message))

    def _request(self, command: Command) -> asyncio.Future[ForkedProcess]:
        """Sent at once, with its descriptors, which may be closed when the caller is cancelled."""
        self.start()
        assert self._connection is not None
        names, descriptors = list(command.descriptors), list(command.descriptors.values())
        request = {"options": dict(command.options), "descriptors": names, "environment": dict(command.environment)}
        socket.send_fds(self._connection, [json.dumps(request).encode()], [command.stdin, command.output, *descriptors])
        forked: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._pending.append(forked)
        return forked

    def _receive(self) -> None:
        """Handle the answers that have arrived; they come in the order of the requests."""
        assert self._connection is not None
        with contextlib.suppress(BlockingIOError):
            while answer := _received(self._connection):
                self._handle(json.loads(answer), self._pending.popleft())
            asyncio.get_running_loop().remove_reader(self._connection)

    @staticmethod
    def _handle(answer: Mapping[str, int], forked: asyncio.Future[ForkedProcess]) -> None:
        if "error" in answer:
            if not forked.done():
                forked.set_exception(OSError(answer["error"], os.strerror(answer["error"])))
            return
        process = ForkedProcess(answer["pid"])
        if forked.done():  # cancelled
            process.send_signal(signal.SIGKILL)
        else:
            forked.set_result(process)


def spawner_of(
    role: str,
    module: str,
    environment: Mapping[str, str],
    *,
    hang_timeout: float,
    start_timeout: float = math.inf,
) -> Spawner:
    """A fork server where the system allows one; the arguments are those of `ForkServer`."""
    if not ForkServer.is_available():
        return INTERPRETERS
    return ForkServer(role, module, environment, hang_timeout=hang_timeout, start_timeout=start_timeout)


class ForkedProcess:
    """A child that a fork server has forked; see `ChildProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Wait for the end. Returns the exit code, negative for a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int, /) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 0)
            threading.Thread(target=_reap_orphans, args=(self.pid,), daemon=True).start()
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


def _reap_orphans(group: int) -> None:
    """Wait for the descendants that a child has left in its process group: they are children of this process now."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def _received(connection: socket.socket) -> bytes:
    """The next message; empty at the end of the other process."""
    try:
        return connection.recv(LONGEST_MESSAGE)
    except ConnectionResetError:  # it has ended without reading all requests
        return b""


def adopt_orphans(value: bool = True) -> None:
    """Become the parent of descendants whose parent ends, as children of a fork server do at their start; or stop it.

    Raises OSError if the system has no such attribute.
    """
    set_process_attribute("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, value)

"""Runs `megatron-operator` commands."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 90.0


@dataclass(frozen=True)
class Done:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The error message, which must be one line."""
        assert "Traceback" not in self.err, self.err
        (line,) = self.err.splitlines()
        return line


class CommandLine:
    """Runs commands with a kubeconfig, in a namespace."""

    def __init__(self, kubeconfig: Path, namespace: str, *, plugin: bool = False) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self._program = "from megatron_operator.cli import plugin as main" if plugin else ""
        self._program = self._program or "from megatron_operator.cli import main"

    async def run(self, *words: str, input: str = "", **environment: str) -> Done:
        """Runs a command to its end."""
        process = await self._start(*words, **environment)
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate(input.encode())
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())

    async def ok(self, *words: str, input: str = "", **environment: str) -> str:
        """Runs a command, which must succeed; returns its output."""
        done = await self.run(*words, input=input, **environment)
        assert done.code == 0, f"{words}: {done}"
        return done.out

    @contextlib.asynccontextmanager
    async def lines(self, *words: str) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a command as they are printed; ends it afterwards."""
        process = await self._start(*words)
        try:
            yield _lines(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.communicate()

    @contextlib.asynccontextmanager
    async def output(self, *words: str) -> AsyncIterator[Callable[[int], Awaitable[str]]]:
        """Reads the output of a command by numbers of bytes; the command must succeed."""
        process = await self._start(*words)
        stream = process.stdout
        assert stream is not None

        async def read(count: int) -> str:
            async with asyncio.timeout(PATIENCE):
                return (await stream.readexactly(count)).decode()

        try:
            yield read
        except asyncio.IncompleteReadError as error:
            _, err = await process.communicate()
            raise AssertionError(f"the output ended early, exit code {process.returncode}: {err.decode()}") from error
        _, err = await process.communicate()
        assert process.returncode == 0, err

    async def _start(self, *words: str, **environment: str) -> asyncio.subprocess.Process:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRON_", "KUBE"))}
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"{self._program}; main()"),
            *(words[0], "-n", self.namespace, *words[1:]) if self.namespace and words else words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**kept, "KUBECONFIG": str(self.kubeconfig), "NO_PROXY": "127.0.0.1", **environment},
        )


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        async for line in process.stdout:
            yield line.decode().rstrip("\n")

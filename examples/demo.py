"""Demo: serves a resource as processes, chats, pauses, suspends, resumes and shuts down.

Usage: ``demo.py FILE [--map-path PATH=FOLDER]...``. It works like a user: it edits a copy of the resource's file, and
uses the OpenAI endpoint with the official client. The exit code is 0 if all steps succeed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

import openai
import yaml
from rich.console import Console

from megatron_operator.api.v1alpha1 import Phase
from megatron_operator.cli import path_map
from megatron_operator.local.processes import descendants, is_alive
from megatron_operator.local.session import LocalSession, SessionEnded
from megatron_operator.local.snapshot import Snapshot, View
from megatron_operator.local.terminal import session_on

START_SECONDS = 300
CHANGE_SECONDS = 120
ANSWER_SECONDS = 180
PAUSED_SECONDS = 3
"""Time in which a request to the paused engine must not be answered."""
LINE_LENGTH = 88
QUESTION = "What is the capital of France?"
LONG_QUESTION = "Tell me in three sentences why the sky is blue."
INTERRUPTED = 130


class DemoFailed(Exception):
    """A step failed; ``str()`` has the cause."""


class Demo:
    """The steps of the demo, during a session."""

    def __init__(self, session: LocalSession, view: View, file: Path) -> None:
        self._session = session
        self._view = view
        self._file = file

    async def run(self) -> None:
        """Raises DemoFailed, SessionEnded, TimeoutError or openai.OpenAIError."""
        snapshot = await self._session.until(_serves, "a running engine with all replica groups", START_SECONDS)
        async with openai.AsyncOpenAI(
            base_url=snapshot.status.url,
            api_key="none-needed",
            timeout=ANSWER_SECONDS,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),  # no proxy for this machine
        ) as client:
            model = (await client.models.list()).data[0].id
            first = await self._ask(client, model)
            await self._stream(client, model)
            await self._ask_while_paused(client, model)
            await self._suspend_and_resume()
            if await self._ask(client, model) != first:
                raise DemoFailed("the answer at temperature 0 changed over pause and suspension")
            self._view.say("demo: the answer is identical to the first one")

    async def _ask(self, client: openai.AsyncOpenAI, model: str) -> str:
        self._view.say(f"demo: asking {QUESTION!r}")
        reply = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40
        )
        answer = reply.choices[0].message.content or ""
        self._view.say(f"demo: answer {answer!r}")
        if "Paris" not in answer:
            raise DemoFailed(f"the answer to {QUESTION!r} does not name Paris: {answer!r}")
        return answer

    async def _stream(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._view.say(f"demo: streaming the answer to {LONG_QUESTION!r}")
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": LONG_QUESTION}],
            temperature=0,
            max_tokens=96,
            stream=True,
        )
        line, pieces, finished = "", 0, ""
        async for chunk in stream:
            for choice in chunk.choices:
                line += choice.delta.content or ""
                pieces += bool(choice.delta.content)
                finished = choice.finish_reason or finished
            while len(line) > LINE_LENGTH and " " in line[:LINE_LENGTH]:
                head, line = line[:LINE_LENGTH].rsplit(" ", 1)[0], line[line[:LINE_LENGTH].rindex(" ") + 1 :]
                self._view.say(f"  | {head}")
        self._view.say(f"  | {line}")
        if pieces < 2 or not finished:
            raise DemoFailed(f"the stream had {pieces} piece(s) and finish reason {finished!r}")
        self._view.say(f"demo: received {pieces} pieces (finish reason: {finished})")

    async def _ask_while_paused(self, client: openai.AsyncOpenAI, model: str) -> None:
        await self._set_lifecycle("Paused", Phase.PAUSED)
        waiting = asyncio.create_task(self._ask(client, model))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=PAUSED_SECONDS)
            if done:
                await waiting
                raise DemoFailed("a request was answered although the engine is paused")
            self._view.say("demo: paused; the request waits")
            await self._set_lifecycle("Running", Phase.RUNNING)
            await waiting
        finally:
            waiting.cancel()
        self._view.say("demo: running; the request was answered")

    async def _suspend_and_resume(self) -> None:
        await self._set_lifecycle("Suspended", Phase.SUSPENDED)
        self._view.say("demo: suspended; the pods stay, the memory of the KV cache is released")
        await self._set_lifecycle("Running", Phase.RUNNING)

    async def _set_lifecycle(self, lifecycle: str, phase: Phase) -> None:
        """Edits the file and waits for the phase."""
        self._view.say(f"demo: writing lifecycle: {lifecycle} into {self._file.name}")
        resource = yaml.safe_load(self._file.read_text())
        resource["spec"]["lifecycle"] = lifecycle
        edited = self._file.with_suffix(".edited")
        edited.write_text(yaml.safe_dump(resource, sort_keys=False))
        edited.replace(self._file)
        await self._session.until(
            lambda snapshot: snapshot.resource.spec.lifecycle == lifecycle and snapshot.status.phase is phase,
            f"phase {phase}",
            CHANGE_SECONDS,
        )


def _serves(snapshot: Snapshot) -> bool:
    status = snapshot.status
    return status.phase is Phase.RUNNING and status.ready_replicas == snapshot.resource.spec.replicas


async def run(file: Path, map_paths: list[str], console: Console) -> int:
    """Runs the demo, which edits ``file``; returns the exit code."""
    with session_on(console, file, path_map(map_paths)) as (session, view):
        return await _run_steps(session, view, Demo(session, view, file))


async def _run_steps(session: LocalSession, view: View, demo: Demo) -> int:
    serving = asyncio.create_task(session.run())
    steps = asyncio.create_task(demo.run())
    interrupted = asyncio.create_task(session.stop_asked())
    await asyncio.wait({serving, steps, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    failure = "interrupted" if interrupted.done() else ""
    # Cancel the open request before the session ends: a paused engine would never answer it.
    for task in (interrupted, steps):
        task.cancel()
    outcome, _ = await asyncio.gather(steps, interrupted, return_exceptions=True)
    started = descendants(os.getpid())
    if not session.stopping:
        session.stop()
    code = await serving
    left = [process.pid for process in started if is_alive(process)]
    failure = failure or _failure(outcome) or (f"processes are still running: {left}" if left else "")
    if failure or code != 0:
        view.say(f"demo: FAILED: {failure or 'the session ended; see its messages above'}")
        return INTERRUPTED if failure == "interrupted" else code or 1
    view.say(f"demo: all {len(started)} processes have ended; the demo succeeded")
    return 0


def _failure(outcome: BaseException | None) -> str:
    if outcome is None or isinstance(outcome, asyncio.CancelledError):
        return ""
    if isinstance(outcome, DemoFailed | SessionEnded | TimeoutError | openai.OpenAIError):
        return str(outcome)
    raise outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--map-path", action="append", default=[], metavar="PATH=FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-demo-") as folder:
        copy = Path(folder, options.file.name)
        copy.write_text(options.file.read_text())
        return asyncio.run(run(copy, options.map_path, Console()))


if __name__ == "__main__":
    sys.exit(main())

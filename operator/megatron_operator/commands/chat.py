"""``chat``: a conversation with the model through the API server's proxy, without a route to the cluster network.

The proxy consumes the ``Authorization`` header, so the API key is sent in ``X-Api-Key``.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import ConditionType, Phase
from megatron_operator.commands.console import program
from megatron_operator.commands.errors import CommandFailed, existing
from megatron_operator.kubernetes.api_server import Json, ServerError
from megatron_operator.kubernetes.user_cluster import BrokenAnswer, EndpointError, UserCluster, core_path
from megatron_operator.status import old_status

API_KEY_HEADER = "X-Api-Key"
API_KEY_VARIABLE = "MEGATRON_API_KEY"
DATA = b"data: "
DONE = b"[DONE]"
PROMPT = "> "
FORGET = "/new"
WELCOME = f"{{name}} is ready. {FORGET} starts a new conversation, Ctrl-D exits."
HELD = (Phase.PAUSED, Phase.SUSPENDED)


@dataclass
class Chat:
    """One conversation. ``options`` are further request fields, such as ``max_tokens``."""

    cluster: UserCluster
    namespace: str
    name: str
    api_key: str | None = None
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    _model: str = ""
    _messages: list[dict[str, str]] = field(default_factory=list)

    async def run(self, question: str | None) -> None:
        """Answer one question, or each line of standard input. Raises CommandFailed, AdapterError."""
        await self._look()
        self._forget()
        if question is not None:
            await self._answer(question)
            return
        # asyncio's own handler would wait for the event loop, which input() blocks.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        is_person = sys.stdin.isatty()
        if is_person:
            import readline  # noqa: F401  # gives input() its line editing

            _tell(WELCOME.format(name=self.name))
        while (line := _next_line(PROMPT if is_person else "")) is not None:
            if line == FORGET:
                self._forget()
            elif line:
                await self._answer(line)

    async def _look(self) -> None:
        """Find the model's name, and check that the resource answers requests."""
        obj = await existing(self.cluster, self.namespace, self.name)
        status = old_status(obj)
        self._model = status.model_name or (obj["spec"].get("model") or {}).get("servedName") or self.name
        ready = status.condition(ConditionType.READY)
        if status.phase in HELD:
            verb = "start" if status.phase is Phase.SUSPENDED else "unpause"
            _tell(f"{self.name} is {status.phase}: requests wait; `{program()} {verb} {self.name}` continues them")
        elif ready is None:
            raise CommandFailed(f"{self.name} does not answer: no operator has reported on it yet")
        elif ready.status == "False":
            raise CommandFailed(f"{self.name} does not answer, {ready.reason}: {ready.message}")

    def _forget(self) -> None:
        self._messages = [{"role": "system", "content": self.system}] if self.system else []

    async def _answer(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        try:
            said = await self._print_answer()
        except BrokenAnswer as error:
            raise self._ended_early() from error
        except EndpointError as error:
            raise CommandFailed(self._complaint(error)) from error
        except ServerError as error:
            if error.status in (404, 503):
                words = f"{self.name} does not answer: {str(error).partition(': ')[2]}"
                raise CommandFailed(f"{words}; see `{program()} describe {self.name}`") from error
            raise
        print(flush=True)
        self._messages.append({"role": "assistant", "content": said})

    async def _print_answer(self, tries: int = 2) -> str:
        """Print and return the answer as it is streamed; one that breaks before its first text is requested again."""
        said = ""
        try:
            async for words in self._stream():
                said += words
                print(words, end="", flush=True)
        except BrokenAnswer:
            if said or tries == 1:
                raise
            return await self._print_answer(tries - 1)
        return said

    async def _stream(self) -> AsyncIterator[str]:
        """The answer, as it is streamed."""
        service = f"{names.http_service(self.name)}:http"
        path = f"{core_path(self.namespace, 'services')}/{service}/proxy/v1/chat/completions"
        body = {"model": self._model, "messages": self._messages, "stream": True, **self.options}
        headers = {API_KEY_HEADER: self.api_key} if self.api_key else {}
        async with self.cluster.stream("POST", path, body=body, headers=headers) as answer:
            async for line in answer.content:
                data = line.strip().removeprefix(DATA)
                if data == DONE:
                    return
                if data and line.startswith(DATA):
                    yield _words_of(json.loads(data))
        raise self._ended_early()

    def _ended_early(self) -> CommandFailed:
        return CommandFailed(f"{self.name}: the answer ended early; ask again")

    def _complaint(self, error: EndpointError) -> str:
        if error.status == 401:
            wrong = "rejects this API key" if self.api_key else "requires an API key"
            return f"{self.name} {wrong}: use --api-key KEY, or set {API_KEY_VARIABLE}"
        return f"{self.name} rejects the request ({error.status}): {error}"


def _words_of(chunk: Json) -> str:
    if "error" in chunk:
        raise CommandFailed(f"the answer ended with an error: {chunk['error'].get('message')}")
    choices = chunk.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _next_line(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _tell(words: str) -> None:
    print(words, file=sys.stderr)

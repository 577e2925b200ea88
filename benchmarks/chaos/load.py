"""A steady load on an endpoint from programs that use the official client with its default settings.

Usage: `load.py URL OUT REQUESTS SECONDS`: starts a request every SECONDS, independent of the earlier ones; every second
one streams. Each finished request is a line of JSON in OUT, described in `outcome.py`. A program whose client gives up
retries every second for a minute. Imports nothing of this project.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import httpx
import openai

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is the capital of Japan?",
    "Why is the sky blue?",
    "What is the capital of Italy?",
    "Write a sentence about a cat.",
    "How many legs does a spider have?",
    "What is water made of?",
)
MOST_TOKENS = 24
PROGRAMS = 4
"""Number of programs, each with its own client and connections."""
PAUSE, PATIENCE = 1.0, 60.0
"""Seconds before a program retries, and for which it retries."""
RETRYABLE = (408, 409, 429)


class TruncatedStreamError(Exception):
    """A stream ended normally but without its last part, which clients would not notice."""


async def ask(client: openai.AsyncOpenAI, question: str, streamed: bool, begun: list[str]) -> tuple[str, int]:
    """The answer, and the number of the client's own retries; ``begun`` is filled as soon as a stream has begun."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "max_tokens": MOST_TOKENS}
    create = client.chat.completions.with_raw_response.create
    response = await create(model="smollm2", temperature=0, stream=streamed, **asked)
    answer: Any = response.parse()
    if not streamed:
        return answer.choices[0].message.content or "", response.retries_taken
    is_whole = False
    begun.append("")
    async with answer:
        async for part in answer:
            for choice in part.choices:
                begun.append(choice.delta.content or "")
                is_whole = is_whole or choice.finish_reason is not None
    if not is_whole:
        raise TruncatedStreamError
    return "".join(begun), response.retries_taken


def described(error: Exception, is_interrupted: bool) -> dict[str, Any]:
    """The information about an error that a program has."""
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    by_kind = isinstance(error, openai.APIConnectionError | httpx.TransportError)
    # An error within a stream has no status: that of the response was 200.
    by_status = is_interrupted if status is None else status in RETRYABLE or status >= 500
    is_retryable = not isinstance(error, TruncatedStreamError) and (by_kind or by_status)
    words = {"kind": type(error).__name__, "status": status, "message": str(error)[:300]}
    return {**words, "retryable": is_retryable, "interrupted": is_interrupted}


async def run_one(client: openai.AsyncOpenAI, number: int, out: TextIO) -> None:
    """Runs one request of a program until it is answered or given up."""
    streamed, question = number % 2 == 1, number // 2 % len(QUESTIONS)
    at, began = time.time(), time.monotonic()
    text, retries, errors = None, 0, []
    while text is None and time.monotonic() < began + PATIENCE:
        begun: list[str] = []
        try:
            text, retries = await ask(client, QUESTIONS[question], streamed, begun)
        except (openai.OpenAIError, httpx.HTTPError, TruncatedStreamError) as error:
            errors.append(described(error, is_interrupted=bool(begun)))
            await asyncio.sleep(PAUSE)
    line = {"number": number, "streamed": streamed, "question": question, "at": at, "text": text, "errors": errors}
    print(json.dumps({**line, "seconds": time.monotonic() - began, "retries": retries}), file=out, flush=True)


async def main(url: str, out: Path, requests: int, seconds: float) -> None:
    clients = [openai.AsyncOpenAI(base_url=url, api_key="unused") for _ in range(PROGRAMS)]
    began = time.monotonic()
    with out.open("w") as file:
        async with asyncio.TaskGroup() as tasks:
            for number in range(requests):
                await asyncio.sleep(max(0.0, began + number * seconds - time.monotonic()))
                tasks.create_task(run_one(clients[number // 2 % PROGRAMS], number, file))
    for client in clients:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))

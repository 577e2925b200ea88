"""A steady load on an endpoint, as programs make it that use the official client as it comes.

Usage: `load.py URL OUT REQUESTS SECONDS`: so many requests, one begun every so many seconds, whatever became of those
before; every second one streams. Each is a line of JSON in OUT once it has ended; `outcome.py` says what is in it. A
program whose client gives up asks again a second later, for a minute. Imports nothing of this project.
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
"""Each has a client of its own, with that client's own connections."""
PAUSE, PATIENCE = 1.0, 60.0
"""Seconds before a program asks again by itself, and for which it does."""
RETRYABLE = (408, 409, 429)


class TruncatedStreamError(Exception):
    """A stream that ended in good order, and without its last part: nobody would have noticed."""


async def ask(client: openai.AsyncOpenAI, question: str, streamed: bool, begun: list[str]) -> tuple[str, int]:
    """The answer, and how often the client itself asked again; ``begun`` fills as soon as a stream has begun."""
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


def told(error: Exception, is_broken: bool) -> dict[str, Any]:
    """What the program could know of an error."""
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    by_kind = isinstance(error, openai.APIConnectionError | httpx.TransportError)
    # An error within a stream has no status of its own: the connection had one, and that was 200.
    by_status = is_broken if status is None else status in RETRYABLE or status >= 500
    is_retryable = not isinstance(error, TruncatedStreamError) and (by_kind or by_status)
    words = {"kind": type(error).__name__, "status": status, "message": str(error)[:300]}
    return {**words, "retryable": is_retryable, "broken": is_broken}


async def run_one(client: openai.AsyncOpenAI, number: int, out: TextIO) -> None:
    """One request of a program, until it is answered or given up."""
    streamed, question = number % 2 == 1, number // 2 % len(QUESTIONS)
    at, began = time.time(), time.monotonic()
    text, retries, errors = None, 0, []
    while text is None and time.monotonic() < began + PATIENCE:
        begun: list[str] = []
        try:
            text, retries = await ask(client, QUESTIONS[question], streamed, begun)
        except (openai.OpenAIError, httpx.HTTPError, TruncatedStreamError) as error:
            errors.append(told(error, is_broken=bool(begun)))
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

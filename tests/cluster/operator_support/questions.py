"""Requests to SmolLM2, and their behavior during a pause."""

import asyncio
from typing import Any

import openai
from operator_support.resource import Resource, condition

QUESTION = "What is the capital of France?"


async def ask(client: openai.AsyncOpenAI, length: int = 24, **more: Any) -> str:
    """The complete answer, of at most ``length`` tokens."""
    answer = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=length, **more
    )
    return answer.choices[0].message.content or ""


async def check_requests_wait(resource: Resource, client: openai.AsyncOpenAI) -> None:
    """Checks that a request during a pause waits through a suspension, and is answered when the engines run again."""
    await resource.patch({"lifecycle": "Paused"})
    await resource.kubectl("wait", "--for=condition=Paused", f"mi/{resource.name}", "--timeout=50s")
    waiting = asyncio.create_task(ask(client))
    await resource.patch({"lifecycle": "Suspended"})
    status = await resource.until_phase("Suspended")
    assert condition(status, "Ready")["reason"] == "Suspended"
    assert not waiting.done()
    await resource.patch({"lifecycle": "Running"})
    await resource.until_phase("Running")
    assert "Paris" in await waiting

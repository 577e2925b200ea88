"""The memory that large bodies take together, with the app of a frontend."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient, Response

from megatron_runtime.server.app import create_app
from megatron_runtime.server.frontend_context import FrontendContext

KEY = "key-of-a-client"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
CONNECTIONS = 4
MOST = 4
"""The limit of benchmarks/attacks.py."""


def wide(number: int) -> dict[str, Any]:
    fields = {f"field_{index}_of_many": {"type": "string", "maxLength": 50} for index in range(number)}
    return {"type": "object", "properties": fields}


def tool(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": wide(4_000), **fields}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": wide(20_000)}}},
        {"tools": [tool(number) for number in range(5)], "tool_choice": "required"},
        {"tools": [tool(number) for number in range(5)]},
        {"chat_template_kwargs": {"x": wide(20_000)}, "messages": [{"role": "user", "content": "x" * 100_000}]},
    ],
    ids=["schema", "required tools", "tools", "variables"],
)
async def test_bodies_take_at_most_a_few_times_their_size_before_they_are_refused(
    make_context: Callable[..., FrontendContext], fields: dict[str, Any]
) -> None:
    """They took 5 to 9 times their size as Python objects, of which several waited for the next work."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **fields}
    raw = json.dumps(body).encode()
    assert len(raw) > 2**20
    app = create_app(make_context([KEY]))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:

        async def send() -> Response:
            return await client.post("/v1/chat/completions", content=raw, headers=HEADERS)

        await send()
        tracemalloc.start()
        try:
            answers = await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert {answer.status_code for answer in answers} == {400}
    assert peak < MOST * CONNECTIONS * len(raw)

"""The endpoint with OpenAI's asynchronous client, LangChain's chat model, and curl."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, Field, SecretStr

pytestmark = pytest.mark.model

ASKED = "What is the weather in Paris?"


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Köln"]
    days: int = Field(ge=1, le=9)


@tool
def weather(city: Literal["Paris", "Köln"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


# OpenAI, asynchronous


async def test_many_streams_of_calls_run_in_parallel(shared_pod: Any) -> None:
    async def call(client: AsyncOpenAI, seed: int) -> Any:
        async with client.chat.completions.stream(
            model="chat",
            messages=[{"role": "user", "content": ASKED}],
            tools=[pydantic_function_tool(GetWeather)],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
        ) as stream:
            completion = await stream.get_final_completion()
        (made,) = completion.choices[0].message.tool_calls or []
        return made.function.parsed_arguments

    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
        AsyncOpenAI(base_url=f"{shared_pod.http.base_url}/v1", api_key="none", http_client=http) as client,
    ):
        made = await asyncio.gather(*(call(client, seed) for seed in range(6)))
        parsed = await client.chat.completions.parse(
            model="chat", messages=[{"role": "user", "content": ASKED}], response_format=GetWeather
        )
    assert all(isinstance(arguments, GetWeather) for arguments in made)
    assert isinstance(parsed.choices[0].message.parsed, GetWeather)


# LangChain


@pytest.fixture
def langchain(shared_pod: Any) -> Iterator[ChatOpenAI]:
    with httpx.Client(timeout=60, trust_env=False) as http:
        yield ChatOpenAI(
            model="chat",
            base_url=f"{shared_pod.http.base_url}/v1",
            api_key=SecretStr("none"),
            http_client=http,
            temperature=0,
            max_retries=0,
        )


def test_langchain_chats_and_streams(langchain: ChatOpenAI) -> None:
    asked = langchain.bind(max_tokens=12)
    whole = asked.invoke("What is the capital of France?")
    chunks = list(asked.stream("What is the capital of France?", stream_usage=True))
    assert "Paris" in str(whole.content)
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert len(chunks) > 3
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


def test_langchain_calls_tools_and_continues_with_their_results(langchain: ChatOpenAI) -> None:
    bound = langchain.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(ASKED)
    (call,) = answer.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == f"It is sunny in {call['args']['city']}."
    final = langchain.bind_tools([weather]).invoke([HumanMessage(ASKED), answer, result], max_tokens=20)
    assert final.content
    pieces = list(bound.stream(ASKED))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert [(made["name"], made["args"]) for made in total.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_structured_output_in_every_way(langchain: ChatOpenAI, method: Any) -> None:
    if method == "json_mode":
        assert isinstance(langchain.with_structured_output(None, method=method).invoke(ASKED, max_tokens=300), dict)
    else:
        assert isinstance(langchain.with_structured_output(GetWeather, method=method).invoke(ASKED), GetWeather)


# curl


def test_curl_gets_whole_answers_and_streams(shared_pod: Any) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 5, "temperature": 0}

    def curl(**fields: Any) -> str:
        command = ["curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer", "--noproxy", "*"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps({**body, **fields})]
        url = f"{shared_pod.http.base_url}/v1/chat/completions"
        return subprocess.run([*command, url], capture_output=True, text=True, check=True, timeout=60).stdout

    whole = json.loads(curl())["choices"][0]["message"]["content"]
    lines = [line for line in curl(stream=True).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole

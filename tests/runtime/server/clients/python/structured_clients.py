"""Uses instructor, pydantic-ai and LiteLLM with an endpoint: `structured_clients.py URL`; prints results as JSON."""

import functools
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import instructor
import litellm
import openai.resources  # noqa: F401 - modules that import each other: two threads that begin with them deadlock
from openai import OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = [{"role": "user", "content": "What is the weather in Paris? Answer in JSON."}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Köln"]
    days: int = Field(ge=1, le=9)


MODES: dict[str, Any] = {
    "FUNCTIONS": GetWeather,
    "TOOLS": GetWeather,
    "TOOLS_STRICT": GetWeather,
    "PARALLEL_TOOLS": Iterable[GetWeather],
    "RESPONSES_TOOLS": GetWeather,
    "RESPONSES_TOOLS_WITH_INBUILT_TOOLS": GetWeather,
    "JSON_SCHEMA": GetWeather,
    "JSON": GetWeather,
    "MD_JSON": GetWeather,
    "JSON_O1": GetWeather,
}
"""Every mode of instructor for OpenAI, with the type to request."""


def by_instructor(url: str, mode: str, wanted: Any) -> str:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode[mode])
    limit = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 120}
    # A small model does not choose to call tools, nor does it follow a schema that is only in the prompt.
    schema = GetWeather.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    forced = {
        "PARALLEL_TOOLS": {"tool_choice": "required", "parallel_tool_calls": False},
        "JSON": {"response_format": form},
        "MD_JSON": {"guided_json": schema},
        "JSON_O1": {"response_format": form},
    }
    asked = {"model": "chat", "messages": ASKED, "temperature": 0, "max_retries": 0, **limit}
    asked["extra_body"] = forced.get(mode, {})
    made = client.chat.completions.create(response_model=wanted, **asked)
    return type(next(iter(made)) if mode == "PARALLEL_TOOLS" else made).__name__


def by_pydantic_ai(url: str, kind: type[Any], output: Any) -> str:
    model = kind("chat", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, output_type=output, retries=0, model_settings={"temperature": 0, "max_tokens": 60})
    return type(agent.run_sync(ASKED[0]["content"]).output).__name__


def by_litellm(url: str) -> str:
    try:
        long = [{"role": "user", "content": "word " * 9000}]
        litellm.completion(model="openai/chat", api_base=url, api_key="none", messages=long, max_retries=0)
    except Exception as error:
        return type(error).__name__
    return ""


def attempted(function: Any, *words: Any) -> str:
    """The result, or the error as text."""
    try:
        return str(function(*words))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]


def main() -> None:
    """All clients together, because the engine answers many requests in little more time than one."""
    url = sys.argv[1]
    outputs = {"tool": ToolOutput(GetWeather), "native": NativeOutput(GetWeather)}
    with ThreadPoolExecutor(len(MODES) + len(outputs) + 2) as pool:
        begin = functools.partial(pool.submit, attempted)
        modes = {mode: begin(by_instructor, url, mode, wanted) for mode, wanted in MODES.items()}
        chats = {name: begin(by_pydantic_ai, url, OpenAIChatModel, form) for name, form in outputs.items()}
        responses = begin(by_pydantic_ai, url, OpenAIResponsesModel, outputs["tool"])
        found = {
            "litellm": pool.submit(by_litellm, url).result(),
            "instructor": {mode: answer.result() for mode, answer in modes.items()},
            "pydantic_ai": {name: answer.result() for name, answer in chats.items()},
            "pydantic_ai_responses": responses.result(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

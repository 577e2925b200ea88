"""Uses LlamaIndex's OpenAI-like models with an endpoint: `llamaindex_client.py URL`; prints the results as JSON."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai.resources  # noqa: F401 - modules that import each other: two threads that begin with them deadlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

FRANCE = "What is the capital of France?"
ASKED = "What is the weather in Paris?"


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Köln"]
    days: int = Field(ge=1, le=9)


def weather(city: Literal["Paris", "Köln"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def main() -> None:
    model = OpenAILike(
        model="chat",
        api_base=sys.argv[1],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    completing = OpenAILike(
        model="chat", api_base=sys.argv[1], api_key="none", is_chat_model=False, temperature=0, max_tokens=8
    )
    messages = [ChatMessage(role="user", content=FRANCE)]
    tool = FunctionTool.from_defaults(weather)
    with ThreadPoolExecutor(6) as pool:  # The engine answers many requests in little more time than one.
        streaming = pool.submit(lambda: list(model.stream_chat(messages)))
        calling = pool.submit(model.chat_with_tools, [tool], user_msg=ASKED, tool_required=True)
        chat = pool.submit(model.chat, messages)
        completed = pool.submit(completing.complete, "The capital of France is")
        result = pool.submit(model.predict_and_call, [tool], user_msg=ASKED, tool_required=True)
        structured = pool.submit(model.as_structured_llm(GetWeather).complete, ASKED)
    pieces = streaming.result()
    found = {
        "chat": chat.result().message.content,
        "streamed": "".join(piece.delta or "" for piece in pieces),
        "pieces": len(pieces),
        "completed": completed.result().text,
        "calls": [
            {"name": call.tool_name, "arguments": call.tool_kwargs}
            for call in model.get_tool_calls_from_response(calling.result())
        ],
        "result": str(result.result()),
        "structured": structured.result().raw.model_dump(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

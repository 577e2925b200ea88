"""Tools and reasoning in responses, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

pytestmark = pytest.mark.model

ASKED = "What is the weather in Paris?"
SAID = (
    'start: "Let me see. " '
    '"<tool_call>\\n{\\"name\\": \\"now\\", \\"arguments\\": {\\"zone\\": \\"ö\\"}}\\n</tool_call>'
    '<tool_call>{\\"name\\": \\"now\\"}</tool_call>"'
)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Köln"]


def flat(tool: Any) -> Any:
    return {"type": "function", **tool["function"]}


WEATHER = flat(pydantic_function_tool(GetWeather))
NOW: Any = {"type": "function", "name": "now", "parameters": None, "strict": False}


def ask(pod: Any, **fields: Any) -> Any:
    asked = {"model": "chat", "input": ASKED, "tools": [WEATHER], "temperature": 0, "max_output_tokens": 80, **fields}
    return pod.openai.responses.create(**asked)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "GetWeather"}])
def test_a_required_call_is_an_output_item(shared_pod: Any, choice: Any) -> None:
    response = ask(shared_pod, tool_choice=choice, parallel_tool_calls=False)
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "GetWeather", "completed")
    assert GetWeather(**json.loads(call.arguments))
    assert response.tools[0].name == "GetWeather"
    assert response.tool_choice == choice or response.tool_choice.model_dump() == choice


def test_the_events_of_a_stream_build_the_calls(shared_pod: Any) -> None:
    asked = {"model": "chat", "input": ASKED, "tools": [NOW], "extra_body": {"guided_grammar": SAID}}
    with shared_pod.openai.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    message, first, second = final.output
    assert message.content[0].text == "Let me see."
    assert (first.name, first.arguments, second.arguments) == ("now", '{"zone": "ö"}', "{}")
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.output_index == 1) == first.arguments
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.item_id, event.arguments) for event in done] == [(i.id, i.arguments) for i in (first, second)]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.type for event in added] == ["message", "function_call", "function_call"]
    assert added[1].item.arguments == ""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({item.id for item in final.output}) == len({first.call_id, second.call_id}) + 1 == 3


def test_a_conversation_continues_after_a_call(shared_pod: Any) -> None:
    first = ask(shared_pod, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    items: list[Any] = [{"role": "user", "content": ASKED}, call.model_dump(), result]
    calls = [{"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}]
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."},
    ]
    again = ask(shared_pod, input=items, max_output_tokens=12)
    tools = [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
    chat = shared_pod.openai.chat.completions.create(
        model="chat", messages=messages, tools=tools, temperature=0, max_tokens=12
    )
    assert again.output_text == chat.choices[0].message.content
    assert again.usage.input_tokens == chat.usage.prompt_tokens

"""Tools in OpenAI's API, with a model whose chat template does not support them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
NOW = {"type": "function", "function": {"name": "now"}}
CUTTING_LIMITS = (1, 2, *range(8, 60, 7))
"""Limits of tokens that end a call of GetWeather in each of its parts."""
TWO_CALLS = (
    '<tool_call>\\n{\\"name\\": \\"GetWeather\\", \\"arguments\\": {\\"city\\": \\"Köln\\"}}\\n</tool_call>\\n'
    '<tool_call>{\\"name\\": \\"now\\"}</tool_call>'
)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Köln"]
    days: int = Field(ge=1, le=9)
    unit: Literal["celsius", "fahrenheit"]


WEATHER: Any = pydantic_function_tool(GetWeather)
TOOLS: list[Any] = [WEATHER, NOW]


def ask(pod: Any, **fields: Any) -> Any:
    asked = {"model": "chat", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields}
    return pod.openai.chat.completions.create(**asked)


def prompt_of(pod: Any, **fields: Any) -> str:
    tokens = pod.post("/tokenize", fields).json()["tokens"]
    text: str = pod.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    return text


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def streamed_calls(chunks: list[Any]) -> list[dict[str, str]]:
    """The calls, assembled from the deltas of a stream, whose order is checked."""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(calls) - 1
                    assert call.function.name is None
                    calls[-1]["arguments"] += call.function.arguments
    return calls


@pytest.mark.parametrize("temperature", [0, 2])
def test_a_required_call_always_parses(shared_pod: Any, temperature: float) -> None:
    parsed = shared_pod.openai.chat.completions.parse(
        model="chat",
        messages=ASKED,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        max_tokens=120,
    ).choices[0]
    (call,) = parsed.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert call.id.startswith("call_")
    assert (parsed.finish_reason, parsed.message.content) == ("tool_calls", None)


def test_a_streamed_call_has_its_name_first_and_then_its_arguments(shared_pod: Any) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False}
    whole, chunks = shared_pod.together(
        lambda: ask(shared_pod, **asked).choices[0], lambda: list(ask(shared_pod, **asked, stream=True, logprobs=True))
    )
    (call,) = streamed_calls(chunks)
    assert [(call["name"], json.loads(call["arguments"]))] == calls_of(whole.message)
    assert sum(bool(choice.delta.tool_calls) for chunk in chunks for choice in chunk.choices) > 3
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]
    tokens = [entry.token for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
    assert "".join(tokens).startswith("<tool_call>\n")


def test_a_named_function_is_the_one_that_is_called(shared_pod: Any) -> None:
    named = {"type": "function", "function": {"name": "GetWeather"}}
    answer = ask(shared_pod, tool_choice=named, n=2, temperature=1, seed=1)
    for choice in answer.choices:
        ((name, arguments),) = calls_of(choice.message)
        assert name == "GetWeather"
        assert GetWeather(**arguments)
        assert choice.finish_reason == "stop"


def test_the_stream_helper_of_the_client_assembles_calls(shared_pod: Any) -> None:
    named = {"type": "function", "function": {"name": "GetWeather"}}
    with shared_pod.openai.chat.completions.stream(
        model="chat", messages=ASKED, tools=[WEATHER], tool_choice=named, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_an_unconstrained_answer_are_parsed(shared_pod: Any, stream: bool) -> None:
    said = {"guided_grammar": f'start: "Let me see. " "{TWO_CALLS}"'}
    answer = ask(shared_pod, tools=[NOW], extra_body=said, stream=stream)
    if stream:
        chunks = list(answer)
        calls = [(call["name"], json.loads(call["arguments"])) for call in streamed_calls(chunks)]
        content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        (reason,) = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    else:
        (choice,) = answer.choices
        calls, content, reason = calls_of(choice.message), choice.message.content, choice.finish_reason
    assert content == "Let me see."
    assert calls == [("GetWeather", {"city": "Köln"}), ("now", {})]
    assert reason == "tool_calls"


def test_parallel_calls_can_be_disabled(shared_pod: Any) -> None:
    said = {"guided_grammar": f'start: "{TWO_CALLS}"'}
    answer = ask(shared_pod, tools=[NOW], extra_body=said, parallel_tool_calls=False)
    assert calls_of(answer.choices[0].message) == [("GetWeather", {"city": "Köln"})]


def test_a_model_with_tools_may_answer_with_text(shared_pod: Any) -> None:
    (choice,) = ask(shared_pod, extra_body={"guided_choice": ["It is sunny. "]}).choices
    assert (choice.message.content, choice.message.tool_calls) == ("It is sunny. ", None)
    assert choice.finish_reason == "stop"


def test_an_answer_is_structured_output_or_a_call_of_a_strict_tool(shared_pod: Any) -> None:
    class Lighthouse(BaseModel):
        metres: int = Field(ge=0, le=999)

    asked = {"model": "chat", "messages": ASKED, "tools": [WEATHER], "max_tokens": 120}
    parse = partial(shared_pod.openai.chat.completions.parse, **asked, response_format=Lighthouse)
    for answer in shared_pod.together(*(partial(parse, seed=seed) for seed in range(3))):
        (choice,) = answer.choices
        calls = [call.function.parsed_arguments for call in choice.message.tool_calls or []]
        assert isinstance(choice.message.parsed, Lighthouse) or any(isinstance(call, GetWeather) for call in calls)


def test_a_response_format_beside_a_required_call_is_accepted(shared_pod: Any) -> None:
    """As by OpenAI: the answer is the call."""
    fields = {"tool_choice": "required", "response_format": {"type": "json_object"}, "parallel_tool_calls": False}
    (choice,) = ask(shared_pod, tools=[WEATHER], **fields).choices
    ((name, _),) = calls_of(choice.message)
    assert (name, choice.message.content, choice.finish_reason) == ("GetWeather", None, "tool_calls")


def test_a_required_call_that_the_token_limit_cuts_off_leaves_no_markup(shared_pod: Any) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required"}

    def whole(tokens: int) -> Any:
        return ask(shared_pod, **fields, max_tokens=tokens).choices[0]

    def streamed(tokens: int) -> Any:
        chunks = ask(shared_pod, **fields, max_tokens=tokens, stream=True)
        return [piece for chunk in chunks for piece in chunk.choices]

    answers = shared_pod.together(*(partial(form, limit) for limit in CUTTING_LIMITS for form in (whole, streamed)))
    for tokens, choice, pieces in zip(CUTTING_LIMITS, answers[::2], answers[1::2], strict=True):
        assert (tokens, choice.finish_reason, pieces[-1].finish_reason) == (tokens, "length", "length")
        assert not choice.message.content, tokens
        assert not any(piece.delta.content for piece in pieces), tokens


def test_responses_and_messages_of_a_call_that_is_cut_off_have_no_markup(shared_pod: Any) -> None:
    function = {"type": "function", "name": "now"}
    asked = {"model": "chat", "max_output_tokens": 1, "tool_choice": "required", "input": "Now?"}
    response = shared_pod.openai.responses.create(**asked, tools=[function])
    assert (response.status, response.output_text) == ("incomplete", "")
    tool = {"name": "now", "input_schema": {"type": "object"}}
    body = {"model": "chat", "messages": ASKED, "max_tokens": 1, "tools": [tool], "tool_choice": {"type": "any"}}
    message = shared_pod.post("/v1/messages", body).json()
    assert (message["stop_reason"], [block.get("text") for block in message["content"]]) == ("max_tokens", [""])


def test_the_prompt_has_the_tools_and_the_earlier_calls(shared_pod: Any) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "ö"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Noon."}]},
    ]
    prompt = prompt_of(shared_pod, messages=messages, tools=TOOLS)
    assert prompt.count("<|im_start|>system\nBe brief.") == 1
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}\n</tools>' in prompt
    assert "The weather of a city." in prompt
    assert "strict" not in prompt
    said = '<tool_call>\n{"name": "now", "arguments": {"zone": "ö"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{said}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nNoon.\n</tool_response><|im_end|>" in prompt
    assert said in prompt_of(shared_pod, messages=messages)
    assert ask(shared_pod, messages=messages, max_tokens=3).usage.completion_tokens == 3


def test_the_prompt_has_no_tools_with_tool_choice_none(shared_pod: Any) -> None:
    plain = shared_pod.openai.chat.completions.create(model="chat", messages=ASKED, temperature=0, max_tokens=10)
    none = ask(shared_pod, tool_choice="none", max_tokens=10)
    assert none.choices[0].message == plain.choices[0].message
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < ask(shared_pod, max_tokens=1).usage.prompt_tokens


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        ({"tool_choice": "some"}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": [NOW, NOW]}, "tools", "two functions named 'now'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "at least 1"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "requires a call"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}],
            },
            "tools",
            "parameters of 'f'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function",
            "schema of an object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages.0.tool_calls.0.function",
            "must be a JSON object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(200)}}]},
            "tools.0.function.parameters",
            "nested too deeply",
        ),
        ({"functions": [NOW]}, "functions", "not supported"),
    ],
)
def test_an_invalid_combination_of_tools_is_refused(
    shared_pod: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = shared_pod.post("/v1/chat/completions", {"messages": ASKED, "tools": [NOW], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_a_body_that_is_nested_too_deeply_for_an_idempotency_key_is_refused(shared_pod: Any) -> None:
    body = {"messages": ASKED, "max_tokens": 1, "metadata": nested(200)}
    answer = shared_pod.post("/v1/chat/completions", body, **{"Idempotency-Key": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")

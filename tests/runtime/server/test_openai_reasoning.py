"""Reasoning in answers of a model with special tokens for reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

ASKED: list[Any] = [{"role": "user", "content": "Why?"}]
MARKS = ("<think>", "</think>", "[TOOL_CALLS]")
END_OF_THOUGHTS = 258
TEMPLATE = """
{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for message in messages %}
{{- message.role[0] }}:{{ message.content }}
{%- if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls | map(attribute="function") | list | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}a:{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {"properties": {"at": {"enum": ["sky", "sea"]}}, "additionalProperties": False},
        },
    }
]


@pytest.fixture(scope="module")
def pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pod")
    model = write_tiny_checkpoint(folder / "tiny", longest=1024, marks=MARKS, chat_template=TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_p": 0.5, "max_new_tokens": 90}))
    flags = "--dtype float32 --kv-cache-memory 16Mi --frontend-replicas 1 --parsers deepseek_r1"
    flags += " --trust-request-chat-template"
    pod = pod_type(folder, "--model", str(model), *flags.split())
    try:
        yield pod.wait_ready()
    finally:
        pod.end()


def ask(pod: Any, *, stream: bool = False, **fields: Any) -> Any:
    """The message and its finish reason; a stream is assembled from its deltas."""
    known = {"messages", "tools", "tool_choice", "logit_bias", "max_tokens", "response_format", "stop"}
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 60, **fields}
    extra = {name: asked.pop(name) for name in list(asked) if name not in known}
    answer = pod.openai.chat.completions.create(model="chat", temperature=0, **asked, extra_body=extra, stream=stream)
    if not stream:
        return answer.choices[0].message.model_dump() | {"finish_reason": answer.choices[0].finish_reason}
    whole: dict[str, Any] = {"content": None, "reasoning": None, "reasoning_content": None, "arguments": ""}
    for chunk in answer:
        delta = chunk.choices[0].delta.model_dump()
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                whole[name] = (whole[name] or "") + delta[name]
        whole["arguments"] += "".join(call["function"]["arguments"] for call in delta["tool_calls"] or [])
        whole["finish_reason"] = chunk.choices[0].finish_reason
    return whole


ENDS_AT_ONCE = {"logit_bias": {str(END_OF_THOUGHTS): 100}}


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_may_use_all_tokens(pod: Any, stream: bool) -> None:
    never = {"logit_bias": {str(END_OF_THOUGHTS): -100}, "ignore_eos": True}
    message = ask(pod, stream=stream, **never)
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert message["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_constraint_applies_to_the_answer_and_not_to_the_reasoning(pod: Any, stream: bool) -> None:
    message = ask(pod, stream=stream, guided_choice=["Because."], **ENDS_AT_ONCE)
    assert (message["content"], message["reasoning"]) == ("Because.", None)
    thinking = ask(pod, stream=stream, guided_choice=["Because."], logit_bias={"97": 100}, max_tokens=9)
    assert (thinking["content"], thinking["reasoning"]) == (None, "a" * 9)


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_without_reasoning_answers(pod: Any, stream: bool) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}, "guided_choice": ["Because."]}
    message = ask(pod, stream=stream, **off)
    assert (message["content"], message["reasoning"]) == ("Because.", None)


@pytest.mark.parametrize("stream", [True, False])
def test_a_budget_ends_the_reasoning(pod: Any, stream: bool) -> None:
    message = ask(pod, stream=stream, thinking_token_budget=4, logit_bias={"97": 100}, max_tokens=9)
    assert (message["reasoning"], message["content"]) == ("aaaa", "aaaa")
    chosen = ask(pod, stream=stream, thinking_token_budget=3, guided_choice=["Because."], logit_bias={"97": 100})
    assert (chosen["reasoning"], chosen["content"]) == ("aaa", "Because.")
    none = ask(pod, stream=stream, thinking_token_budget=0, guided_choice=["Because."])
    assert (none["reasoning"], none["content"]) == (None, "Because.")


def test_a_budget_of_anthropics_api_ends_the_thinking(pod: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    asked = {"messages": ASKED, "max_tokens": 9, "thinking": thinking, "temperature": 0, "logit_bias": {"97": 100}}
    body = pod.post("/v1/messages", asked).json()
    assert [block.get("thinking") or block.get("text") for block in body["content"]] == ["aaaa", "aaaa"]
    unlimited = pod.post("/v1/messages", {**asked, "thinking": {"type": "adaptive", "budget_tokens": 4}}).json()
    assert [block["thinking"] for block in unlimited["content"]] == ["a" * 9]


def test_an_effort_of_none_disables_reasoning(pod: Any) -> None:
    message = ask(pod, reasoning_effort="none", guided_choice=["Because."])
    assert (message["reasoning"], message["content"]) == (None, "Because.")
    fields = {"input": "Why?", "reasoning": {"effort": "none"}, "guided_choice": ["Because."], "max_output_tokens": 40}
    response = pod.post("/v1/responses", fields).json()
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["reasoning"]["effort"] == "none"


def test_a_trusted_request_replaces_the_chat_template(pod: Any) -> None:
    fields = {"messages": ASKED, "chat_template": "{{ messages[0].content }}?</think>", "max_tokens": 1}
    tokens = pod.post("/v1/chat/completions", {**fields, "return_token_ids": True}).json()["prompt_token_ids"]
    assert tokens == [*b"Why??", END_OF_THOUGHTS]


def test_requests_have_the_sampling_defaults_of_the_checkpoint(pod: Any) -> None:
    asked = {"input": "Why?", "logit_bias": {"97": 100}, "max_output_tokens": 400}
    default = pod.post("/v1/responses", asked).json()
    assert (default["temperature"], default["top_p"]) == (0.25, 0.5)
    assert default["usage"]["output_tokens"] == 90
    given = pod.post("/v1/responses", {**asked, "temperature": 0, "max_output_tokens": 2}).json()
    assert (given["temperature"], given["usage"]["output_tokens"]) == (0, 2)
    assert "sampling defaults of" in pod.log.read_text()
    assert "temperature=0.25, top_p=0.5, max_new_tokens=90; --generation-config vllm disables" in pod.log.read_text()


def test_reasoning_is_excluded_on_request(pod: Any) -> None:
    message = ask(pod, include_reasoning=False, logit_bias={"97": 100}, max_tokens=9)
    assert (message["content"], message.get("reasoning", "none")) == (None, "none")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("off", [True, False])
def test_the_special_token_of_a_call_is_not_in_the_answer(pod: Any, stream: bool, off: bool) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}} if off else ENDS_AT_ONCE
    message = ask(pod, stream=stream, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **fields)
    if stream:
        arguments = message["arguments"]
    else:
        (call,) = message["tool_calls"]
        assert len(call["id"]) == 9
        assert call["function"]["name"] == "look"
        arguments = call["function"]["arguments"]
    assert json.loads(arguments) in ({}, {"at": "sky"}, {"at": "sea"})
    assert (message["content"], message["finish_reason"]) == (None, "tool_calls")


def test_text_may_precede_the_calls_of_a_strict_tool(pod: Any) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask(pod, tools=TOOLS, **off, logit_bias={"259": 100})
    assert message["tool_calls"]
    assert all(
        json.loads(c["function"]["arguments"]) in ({}, {"at": "sky"}, {"at": "sea"}) for c in message["tool_calls"]
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_an_answer_with_markers(pod: Any, stream: bool) -> None:
    said = {"guided_grammar": 'start: "Ab. " <[259]> "look{} xyz"', **ENDS_AT_ONCE}
    message = ask(pod, stream=stream, tools=[{"type": "function", "function": {"name": "look"}}], stop=["x"], **said)
    assert message["content"] == "Ab."
    assert message["finish_reason"] == "tool_calls"


def test_the_template_gets_tools_and_the_arguments_of_calls_as_mappings(pod: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Blue."}]
    tokens = pod.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    prompt = pod.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt.startswith('[TOOLS][{"type": "function", "function": {"name": "look", "parameters": {')
    assert '[TOOL_CALLS][{"name": "look", "arguments": {"at": "sea"}}]' in prompt
    assert "t:Blue." in prompt


def test_reasoning_is_an_item_of_a_response(pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "input": "Why?", "temperature": 0, "max_output_tokens": 9}
    events = list(pod.openai.responses.create(**asked, extra_body={"logit_bias": {"97": 100}}, stream=True))
    final = events[-1].response
    (item,) = final.output
    assert (item.type, item.content[0].text, item.status) == ("reasoning", "a" * 9, "incomplete")
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "a" * 9
    assert final.usage.output_tokens_details.reasoning_tokens == 9
    assert final.output_text == ""
    answered = pod.openai.responses.create(
        **asked | {"max_output_tokens": 20},
        extra_body={**ENDS_AT_ONCE, "guided_choice": ["So."]},
        top_logprobs=1,
    )
    assert answered.output_text == "So."
    assert "".join(entry.token for entry in answered.output[0].content[0].logprobs).endswith("So.")
    again = [{"role": "user", "content": "Why?"}, *(entry.model_dump() for entry in (item, answered.output[0]))]
    assert pod.openai.responses.create(**{**asked, "input": again}).usage.input_tokens > final.usage.input_tokens

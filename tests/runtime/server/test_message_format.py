"""The format of messages, from the chat template and the configured parsers."""

from __future__ import annotations

import pytest
from runtime_support.byte_backend import END, byte_backend
from transformers import PreTrainedTokenizerFast

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.bodies.tools import FunctionDefinition, ToolChoice, ToolUse
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.conversation import chat_prompt
from megatron_runtime.server.messages.message_format import MessageFormat
from megatron_runtime.server.parsers import check_parsers

QWEN = r"""{%- if tools %}{{ "within <tool_call></tool_call>\n<tool_call>\n{\"name\": <function-name>}" }}{% endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}"""
MISTRAL = '{% if tools %}{% endif %}{{ "[TOOL_CALLS]" }}'
PYTHONIC = '{% if tools %}{{ "[func_name1(params_name1=params_value1, params_name2=params_value2)]" }}{% endif %}'
CODER = "{% if tools %}<tool_call>\n<function=example_function>\n<parameter=example>{% endif %}"
UNKNOWN = "{% if tools %}<call f/>{% endif %}"


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_backend(), location="here", eod=END, chat_templates={"default": template})


def use(choice: ToolChoice) -> ToolUse:
    return ToolUse((FunctionDefinition(name="f"),), choice)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (PYTHONIC, "pythonic"),
        (CODER, "qwen3_coder"),
        ("{{ messages }}", "hermes"),
        ("{% broken", "hermes"),
    ],
)
def test_a_template_determines_the_format_of_calls(template: str, expected: str) -> None:
    written = MessageFormat(tokenizer(template)).parsing(use("auto"), []).format
    assert written is not None
    assert written.name == expected


def test_a_configured_parser_overrides_the_template() -> None:
    written = MessageFormat(tokenizer(QWEN), ["pythonic"]).parsing(use("auto"), []).format
    assert written is not None
    assert written.name == "pythonic"


def test_parsers_have_megatrons_names_too() -> None:
    names = ["nemotron-v3-reasoning", "qwen3-coder-tool"]
    check_parsers(names)
    parsing = MessageFormat(tokenizer(QWEN), names).parsing(use("auto"), [])
    assert parsing.format is not None
    assert (parsing.format.name, parsing.starts_with_reasoning) == ("qwen3_coder", True)
    with pytest.raises(ConfigurationError, match="deepseek-r1-reasoning and qwen3 have the same purpose"):
        check_parsers(["deepseek-r1-reasoning", "qwen3"])


def test_an_unknown_format_of_calls_is_refused_unless_a_call_is_required() -> None:
    form = MessageFormat(tokenizer(UNKNOWN))
    with pytest.raises(ApiError, match="--parsers hermes") as caught:
        form.parsing(use("auto"), [])
    assert caught.value.param == "tools"
    forced = form.parsing(use("required"), []).format
    assert forced is not None
    assert forced.name == "hermes"
    assert form.parsing(use("none"), []).is_plain


@pytest.mark.parametrize(
    ("parser", "prompt", "thoughts"),
    [
        ("qwen3", "assistant\n", False),
        ("qwen3", "assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "</think> said earlier. <|Assistant|>", True),
        ("hermes", "<think>", None),
    ],
)
def test_the_end_of_a_prompt_determines_whether_the_answer_begins_with_reasoning(
    parser: str, prompt: str, thoughts: bool | None
) -> None:
    known = tokenizer(QWEN)
    assert MessageFormat(known, [parser]).parsing(ToolUse(), known.tokenize(prompt)).starts_with_reasoning is thoughts


RENDERED = """{% for tool in tools %}{{ tool | tojson }};{{ tool.function.parameters.properties.keys() | list }}
{% endfor %}{% for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.id }}={{ call.function.name }}{{ call.function.arguments | tojson }}
{%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def test_the_template_gets_tools_and_calls_as_with_transformers() -> None:
    function = {
        "name": "look",
        "description": "Öffnet <es>.",
        "parameters": {"type": "object", "properties": {"a": {}}},
    }
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": ["ö", 1.5, None]}}}
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Blue.", "tool_call_id": "1"},
    ]
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), chat_template=RENDERED).apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    sent = {**call, "function": {"name": "look", "arguments": '{"a": ["\\u00f6", 1.5, null]}'}}
    body = {"model": "m", "tools": tools, "messages": [messages[0], {**messages[1], "tool_calls": [sent]}, messages[2]]}
    ours = tokenizer(RENDERED)
    assert ours.detokenize(chat_prompt(ChatCompletionBody.model_validate(body), ours, 8192)) == theirs
    assert "<a>" in theirs

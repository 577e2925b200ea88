"""The format of messages, from the chat template and the configured parsers."""

from __future__ import annotations

import pytest
from runtime_support.byte_backend import END, byte_backend
from transformers import PreTrainedTokenizerFast

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.guided import OutputConstraint
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.bodies.tools import FunctionDefinition, ToolChoice, ToolUse
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.conversation import chat_prompt
from megatron_runtime.server.messages.message import MessageBuilder
from megatron_runtime.server.messages.message_format import MessageFormat
from megatron_runtime.server.parsers import check_parsers

QWEN = r"""{%- if tools %}{{ "within <tool_call></tool_call>\n<tool_call>\n{\"name\": <function-name>}" }}{% endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}"""
MISTRAL = '{% if tools %}{% endif %}{{ "[TOOL_CALLS]" }}'
PYTHONIC = '{% if tools %}{{ "[func_name1(params_name1=params_value1, params_name2=params_value2)]" }}{% endif %}'
CODER = "{% if tools %}<tool_call>\n<function=example_function>\n<parameter=example>{% endif %}"
HARMONY = "{% if tools %}{% endif %}{{ '<|channel|>analysis<|message|>' }}"
V3 = "{{ '<｜tool▁sep｜>' + '```json' }}"
V31 = "{{ '<｜tool▁sep｜>' }}"
GLM = "{% if tools %}<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value></tool_call>{% endif %}"
KIMI = "{% if tools %}<|im_system|>tool_declare<|im_middle|>{% endif %}"
MINIMAX = """{% if tools %}{% set begin = '<minimax:tool_call>' %}<invoke name="a"><parameter name="b">{% endif %}"""
GRANITE = "{% if tools %}<|start_of_role|>available_tools{% endif %}<|tool_call|>"
PHI = "{% if message['tools'] %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"
PHI_FUNCTOOLS = '{% if tools %}functools[{"name": [function name]}]{% endif %}'
GEMMA = "<start_of_turn><start_of_image>"
LLAMA4 = "{% if tools %}<|header_start|>[func_name1(param1=value1)]{% endif %}"
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
        (HARMONY, "openai"),
        (V3, "deepseek_v3"),
        (V31, "deepseek_v31"),
        (GLM, "glm45"),
        (KIMI, "kimi_k2"),
        (MINIMAX, "minimax_m2"),
        (GRANITE, "granite"),
        (GRANITE.replace("<|tool_call|>", "<tool_call>"), "hermes"),
        (PHI, "phi4_mini_json"),
        (PHI_FUNCTOOLS, "phi4_mini_json"),
        (GEMMA, "gemma3"),
        (LLAMA4, "llama4_pythonic"),
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
        ("deepseek_v3", "<｜Assistant｜></think>", None),
        ("deepseek_v3", "<｜Assistant｜><think>", True),
        ("glm45", "<|assistant|>\n<think></think>", None),
        ("glm45", "<|assistant|>", False),
        ("minimax_m2", "]~b]ai\n<think>\n", True),
        ("granite", "assistant", False),
        ("openai_gptoss", "<|start|>assistant", None),
    ],
)
def test_the_end_of_a_prompt_determines_whether_the_answer_begins_with_reasoning(
    parser: str, prompt: str, thoughts: bool | None
) -> None:
    known = tokenizer(QWEN)
    assert MessageFormat(known, [parser]).parsing(ToolUse(), known.tokenize(prompt)).starts_with_reasoning is thoughts


def test_a_parser_of_both_kinds_serves_what_another_one_leaves() -> None:
    def chosen(*names: str) -> tuple[str, bool | None]:
        parsing = MessageFormat(tokenizer(QWEN), names).parsing(use("auto"), [])
        assert parsing.format is not None
        return parsing.format.name, parsing.starts_with_reasoning

    assert chosen("glm45") == ("glm45", False)
    assert chosen("minimax_m2") == ("minimax_m2", True)
    assert chosen("deepseek_v3", "deepseek_v31") == ("deepseek_v31", False)
    assert chosen("deepseek_v3", "deepseek_r1") == ("deepseek_v3", True)
    assert chosen("harmony") == chosen("openai_gptoss") == ("openai", None)
    assert chosen("llama4_json") == ("llama3_json", None)
    with pytest.raises(ConfigurationError, match="glm45 and granite have the same purpose"):
        check_parsers(["glm45", "granite"])
    with pytest.raises(ConfigurationError, match="have the same purpose"):
        check_parsers(["glm45", "hermes", "qwen3"])


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_answers_in_channels_are_parsed_without_configuration(choice: ToolChoice) -> None:
    marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"]
    known = Tokenizer(byte_backend(marks), location="here", eod=END, chat_templates={"default": HARMONY})
    parsing = MessageFormat(known).parsing(use(choice), known.tokenize("<|start|>assistant"))
    assert not parsing.is_plain
    assert parsing.has_parser
    assert parsing.shown_tokens == set(known.special_tokens(marks).values())
    said = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    body = MessageBuilder(parsing)
    made = parsing.new_parser()
    body.add([*made.push(said), *made.finish()])
    message = body.body()
    assert message["reasoning_content"] == "A"
    if choice == "none":
        assert message["content"] == "{}"
    else:
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert (parsing.grammar(None) is None) is (choice != "required")
    only = OutputConstraint("response_format", 'start: "no"', is_response_format=True)
    assert ("final" in (parsing.grammar(only) or "")) is (choice != "required")


def test_strict_functions_of_harmony_may_be_called_or_not() -> None:
    strict = ToolUse((FunctionDefinition(name="f", strict=True), FunctionDefinition(name="g")), "auto")
    grammar = MessageFormat(tokenizer(HARMONY)).parsing(strict, []).grammar(None)
    assert grammar is not None
    assert "final" in grammar
    assert "commentary to=functions." in grammar


def test_a_function_that_the_models_format_cannot_enforce_is_refused() -> None:
    several = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for function in (FunctionDefinition(name="a b"), FunctionDefinition(name="f", parameters=several)):
        parsing = MessageFormat(tokenizer(GLM)).parsing(ToolUse((function,), "required"), [])
        with pytest.raises(ApiError, match=f"tools: the parameters of '{function.name}'") as caught:
            parsing.grammar(None)
        assert (caught.value.status, caught.value.param) == (400, "tools")


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

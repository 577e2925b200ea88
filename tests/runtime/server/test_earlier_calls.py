"""Calls, results and reasoning of earlier turns in the prompts of model families."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.messages.conversation import chat_prompt
from megatron_runtime.server.messages.message_format import MessageFormat

TOOL = {"type": "function", "function": {"name": "w", "parameters": {"properties": {"city": {"type": "string"}}}}}


def called(*cities: str, **fields: Any) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "w", "arguments": f'{{"city": "{city}"}}'}}
        for index, city in enumerate(cities)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sun"} for call in calls]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    return [*asked, {"role": "assistant", "content": "", "tool_calls": calls, **fields}, *results]


def prompt(template: str, messages: list[dict[str, Any]], *parsers: str) -> str:
    known = Tokenizer(byte_backend(), location="here", eod=END, chat_templates={"default": template})
    body = ChatCompletionBody.model_validate({"model": "m", "messages": messages, "tools": [TOOL]})
    return known.detokenize(chat_prompt(body, known, 8192, MessageFormat(known, parsers).tool_format))


DEEPSEEK = """{%- for message in messages -%}
{%- if message['tool_calls'] is defined -%}{%- for tool in message['tool_calls'] -%}
{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
{{- tool['function']['arguments'] + '<e>' }}
{{- '' + tool['function']['arguments'] }}
{%- endfor -%}{%- else -%}{{ message['role'] + ':' + message['content'] + ';' }}{%- endif -%}{%- endfor -%}"""


def test_a_template_that_joins_arguments_with_text_gets_their_json_and_a_description_of_its_format() -> None:
    text = prompt(DEEPSEEK, called("Köln"))
    assert text.endswith('user:Hi;<｜tool▁call▁begin｜>w<｜tool▁sep｜>{"city": "Köln"}<e>{"city": "Köln"}tool:Sun;')
    assert text.startswith("system:You can call functions.")
    example = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><name of the function><｜tool▁sep｜>{"
    assert example in text
    assert "<tool_response>" not in text
    assert "function<｜tool▁sep｜><name of the function>\n```json" in prompt(DEEPSEEK, called("A"), "deepseek_v3")


R1 = """{%- for message in messages -%}{%- if message['role'] == 'assistant' and message['content'] is none -%}
{%- for tool in message['tool_calls'] -%}call:{{ tool['function']['name'] }};{%- endfor -%}
{%- else -%}{{ message['role'] }}:{{ message['content'] }};{%- endif -%}{%- endfor -%}"""


def test_a_message_without_content_has_none_in_templates_that_test_for_it() -> None:
    assert prompt(R1, called("Paris")).endswith("user:Hi;call:w;tool:Sun;")


def test_calls_beside_content_are_text_where_the_template_would_drop_them() -> None:
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
    text = prompt(R1, called("Paris", content="I look."), "deepseek_v3")
    assert text.endswith(f"assistant:I look.\n<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>;tool:Sun;")
    assert prompt(PHI_FUNCTOOLS, called("Paris", content="I look.")).endswith(
        'assistant:I look.\nfunctools[{"name": "w", "arguments": {"city": "Paris"}}];tool:Sun;'
    )
    assert prompt(PHI_FUNCTOOLS, called("Paris")).endswith('assistant:{"name": "w", {"city": "Paris"};tool:Sun;')


PHI_FUNCTOOLS = """{%- if tools -%}functools[{{ tools | tojson }}{%- endif -%}
{%- for message in messages -%}{{ message.role }}:
{%- if message.content -%}{{ message.content }}{%- elif message.tool_calls -%}
{%- for call in message.tool_calls -%}{"name": "{{ call.function.name }}", {{ call.function.arguments }}{%- endfor -%}
{%- endif -%};{%- endfor -%}"""
GRANITE = """{%- if tools -%}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|tool_call|>
{%- endif -%}{%- for message in messages -%}
<|start_of_role|>{{ message['role'] }}<|end_of_role|>{{ message['content'] }}<|end_of_text|>{%- endfor -%}"""


def test_a_template_with_tools_and_without_calls_gets_calls_as_text_and_results_as_they_are() -> None:
    calls = '<|tool_call|>[{"name": "w", "arguments": {"city": "A"}}, {"name": "w", "arguments": {"city": "B"}}]'
    result = "<|start_of_role|>tool<|end_of_role|>Sun<|end_of_text|>"
    answer = f"<|start_of_role|>assistant<|end_of_role|>{calls}<|end_of_text|>"
    assert prompt(GRANITE, called("A", "B")).endswith(f"{answer}{result}{result}")


GEMMA = """{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}
<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n{%- endfor -%}{# <start_of_image> #}"""


def test_a_template_without_calls_gets_them_as_text_and_neighbouring_results_as_one_message() -> None:
    text = prompt(GEMMA, called("Paris", "Rome"))
    assert '[<name of the function>(<parameter>="<value>")]' in text
    assert '<start_of_turn>assistant\n[w(city="Paris"), w(city="Rome")]<end_of_turn>' in text
    result = "<tool_response>\nSun\n</tool_response>"
    assert f"<start_of_turn>user\n{result}\n{result}<end_of_turn>" in text


PHI = """{%- for message in messages -%}{{ message['role'] }}:{{ message['content'] }}
{%- if message['tools'] -%}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{%- endif -%};{%- endfor -%}"""


def test_a_template_with_tools_in_the_system_message_gets_them_there() -> None:
    text = prompt(PHI, [{"role": "system", "content": "Be brief."}, *called("Paris")])
    assert text.startswith('system:Be brief.<|tool|>[{"name": "w", ')
    assert 'assistant:<|tool_call|>[{"name": "w", "arguments": {"city": "Paris"}}]<|/tool_call|>;' in text
    assert prompt(PHI, called("Paris")).startswith("system:<|tool|>")


KIMI = """{%- if tools -%}tool_declare<|im_middle|>{%- endif -%}{%- for message in messages -%}
{%- for call in message.tool_calls or [] -%}
<|tool_calls_section_begin|>{{ call.id }}{{ call.function.arguments | tojson }}
{%- endfor -%}{%- if message.role == 'tool' -%}## Return of {{ message.tool_call_id }};{%- endif -%}{%- endfor -%}"""


def test_calls_of_kimi_are_numbered_through_the_conversation() -> None:
    text = prompt(KIMI, [*called("A", "B"), *called("C")])
    for index in range(3):
        assert f'<|tool_calls_section_begin|>functions.w:{index}{{"city"' in text
        assert f"## Return of functions.w:{index};" in text
    own = called("A")
    own[1]["tool_calls"][0]["id"] = own[2]["tool_call_id"] = "functions.w:7"
    assert text.count("functions.w:7") == 0
    assert prompt(KIMI, own).count("functions.w:7") == 2


HARMONY = """{%- if tools -%}<|channel|>analysis<|message|>{%- endif -%}{%- for message in messages -%}
{%- if message.thinking and message.content and message.tool_calls -%}{{ raise_exception("both") }}{%- endif -%}
{{ message.role }}[{{ message.thinking }}]{{ message.content }};{%- endfor -%}"""


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_templates_of_harmony_get_the_reasoning_under_their_name(field: str) -> None:
    assert "assistant[Hm.];" in prompt(HARMONY, called("A", **{field: "Hm."}))
    if field != "thinking":
        assert "assistant[]I look.;" in prompt(HARMONY, called("A", content="I look.", **{field: "Hm."}))


FIRST_CALLS = """{%- if tools -%}<|channel|>analysis<|message|>{%- endif -%}{%- set last = namespace(name=none) -%}
{%- for message in messages -%}{%- if message.tool_calls -%}{%- set call = message.tool_calls[0].function -%}
{{ message.content }}to={{ call.name }}{{ call.arguments | tojson }};{%- set last.name = call.name -%}
{%- elif message.role == 'tool' -%}from={{ last.name }}:{{ message.content }};{%- endif -%}{%- endfor -%}"""


def test_harmony_has_each_call_in_a_message_of_its_own_before_its_result() -> None:
    asked, answer, first, second = called("A", "B", content="I look.")
    answer["tool_calls"][1]["function"]["name"] = "v"
    messages = [asked, answer, {**second, "content": "Rain"}, first]
    expected = 'I look.to=w{"city": "A"};from=w:Sun;to=v{"city": "B"};from=v:Rain;'
    assert prompt(FIRST_CALLS, messages).endswith(expected)
    again = prompt(FIRST_CALLS, [*messages, *called("C")])
    assert again.endswith(expected + 'to=w{"city": "C"};from=w:Sun;')

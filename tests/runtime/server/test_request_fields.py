"""Fields of OpenAI and vLLM that shape the prompt, the tools and the reasoning of a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.bodies.messages_protocol import MessagesBody
from megatron_runtime.server.bodies.pooling_protocol import ScoreBody
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, CompletionBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.errors import ApiError, _from_validation
from megatron_runtime.server.messages.conversation import chat_prompt
from megatron_runtime.server.messages.message_format import MessageFormat
from megatron_runtime.server.openai.completions import completion_prompts
from megatron_runtime.server.openai.tokenization import TokenizeBody

TEMPLATE = """
{%- for message in messages %}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>{% endfor %}
{%- if tools %}{{ tools | map(attribute="function.name") | list }}{% endif %}
{%- if reasoning_effort %}[{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}]{% endif %}
{%- if verbosity %}[{{ verbosity }}]{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ASKED = [{"role": "user", "content": "Hi"}]
FUNCTIONS: list[Any] = [{"name": name} for name in ("look", "hear", "smell")]


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_backend(), location="here", eod=END, chat_templates={"default": template})


def chat(**fields: Any) -> ChatCompletionBody:
    return ChatCompletionBody.model_validate({"model": "m", "messages": ASKED, **fields})


def prompt(*, trusts_templates: bool = False, template: str = TEMPLATE, **fields: Any) -> str:
    tokens = chat_prompt(chat(**fields), tokenizer(template), 1000, trusts_templates=trusts_templates)
    return tokenizer().detokenize(tokens)


def refusal(body: type[BaseModel], **fields: Any) -> tuple[str | None, str]:
    """The field and the message of the error for a body."""
    needed = {"messages": ASKED, "prompt": "a", "input": "a"} if body is not TokenizeBody else {}
    needed |= {"max_tokens": 1} if body is MessagesBody else {}
    given = {"model": "m"} | {name: needed[name] for name in needed.keys() & body.model_fields.keys()}
    with pytest.raises(ValidationError) as caught:
        body.model_validate(given | fields)
    error = _from_validation(caught.value.errors())
    return error.param, error.message


# Tools


def as_chat(choice: Any) -> ChatCompletionBody:
    return chat(tools=[{"type": "function", "function": each} for each in FUNCTIONS], tool_choice=choice)


def as_response(choice: Any) -> ResponsesBody:
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    return ResponsesBody.model_validate({"model": "m", "input": "Hi", "tools": tools, "tool_choice": choice})


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("names", [["look"], ["smell", "look"]])
def test_only_allowed_tools_are_shown_and_can_be_called(mode: str, names: list[str]) -> None:
    chosen = [{"type": "function", "function": {"name": name}} for name in names]
    flat = [{"type": "function", "name": name} for name in names]
    of_chat = as_chat({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}).tool_use
    of_response = as_response({"type": "allowed_tools", "mode": mode, "tools": flat}).tool_use
    for use in (of_chat, of_response):
        assert use.choice == mode
        assert {function.name for function in use.callable_functions} == set(names)
        assert {tool["function"]["name"] for tool in use.for_template() or []} == set(names)


def test_a_grammar_excludes_other_tools_where_the_format_of_calls_has_one() -> None:
    chosen = [{"type": "function", "function": {"name": "hear"}}]
    allowed = as_chat({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chosen}}).tool_use
    grammar = MessageFormat(tokenizer(), ["hermes"]).parsing(allowed, []).grammar(None)
    assert grammar is not None
    assert "hear" in grammar
    assert "look" not in grammar
    assert MessageFormat(tokenizer(), ["hermes"]).parsing(as_chat("auto").tool_use, []).grammar(None) is None


@pytest.mark.parametrize("make", [as_chat, as_response])
def test_tool_choices_that_are_unknown_are_refused_with_the_known_ones(make: Any) -> None:
    for choice in ({"type": "hosted"}, "always", {"type": "allowed_tools"}, 7):
        with pytest.raises(ValidationError, match="tool_choice"):
            make(choice)
    missing = {"type": "function", "name": "taste", "function": {"name": "taste"}}
    listed = {"mode": "auto", "tools": [missing]}
    with pytest.raises(ValidationError, match="tool_choice allows 'taste', which is not one of the tools"):
        make({"type": "allowed_tools", **listed, "allowed_tools": listed})


@pytest.mark.parametrize("body", [ChatCompletionBody, ResponsesBody])
@pytest.mark.parametrize("kind", ["web_search", "custom", None])
def test_an_unknown_type_of_tools_is_refused_with_the_known_one(body: type[BaseModel], kind: Any) -> None:
    param, message = refusal(body, tools=[{"type": kind}])
    assert param == "tools.0.type"
    assert f"{kind!r} is not a known type of tools; use 'function'" in message
    param, message = refusal(body, tool_choice={"type": "web_search"})
    assert param == "tool_choice"
    assert "must be none, auto, required, or an object of type function or allowed_tools" in message


# Effort


def test_the_effort_reaches_the_template_under_its_names() -> None:
    assert prompt() == "<user>Hi</user><assistant>"
    for effort in ("high", "max"):
        assert prompt(reasoning_effort=effort) == f"<user>Hi</user>[{effort} True True]<assistant>"
    assert prompt(reasoning_effort="none", verbosity="low") == "<user>Hi</user>[none False False][low]<assistant>"
    overridden = prompt(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert overridden == "<user>Hi</user>[low False True]<assistant>"
    assert refusal(ChatCompletionBody, reasoning_effort="much")[0] == "reasoning_effort"
    assert refusal(ChatCompletionBody, verbosity="much")[0] == "verbosity"


def test_a_response_has_the_same_effort() -> None:
    fields = {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}
    body = ResponsesBody.model_validate({"model": "m", "input": "Hi", **fields})
    expected = {"reasoning_effort": "low", "enable_thinking": True, "thinking": True, "verbosity": "high"}
    assert body.template_variables == expected
    assert refusal(ResponsesBody, reasoning={"effort": "much"})[0] == "reasoning.effort"
    assert refusal(ResponsesBody, reasoning={"summary": "detailed"})[0] == "reasoning.summary"


@pytest.mark.parametrize(
    ("tail", "parser", "expected"),
    [
        ("", "deepseek_r1", (5, "", "</think>")),
        ("", "qwen3", (5, "<think>", "</think>")),
        ("<think>\n", "qwen3", (5, "", "</think>")),
        ("<think></think>", "qwen3", (None, "", "</think>")),
    ],
)
def test_a_budget_applies_to_the_reasoning_of_the_answer(tail: str, parser: str, expected: Any) -> None:
    params = SamplingParams(thinking_token_budget=5)
    parsing = MessageFormat(tokenizer(), [parser]).parsing(chat().tool_use, tokenizer().tokenize(tail))
    parsing.limit_thinking(params)
    assert (params.thinking_token_budget, params.thinking_begin, params.thinking_end) == expected


def test_a_budget_needs_a_parser_of_reasoning() -> None:
    parsing = MessageFormat(tokenizer()).parsing(chat().tool_use, [])
    with pytest.raises(ApiError, match=r"thinking_token_budget: .* --parsers deepseek_r1"):
        parsing.limit_thinking(SamplingParams(thinking_token_budget=5))


def test_a_budget_is_refused_for_reasoning_in_a_channel_of_its_own() -> None:
    parsing = MessageFormat(tokenizer(), ["openai_gptoss"]).parsing(chat().tool_use, [])
    with pytest.raises(ApiError, match=r"channel of its own has no budget; .* reasoning_effort") as error:
        parsing.limit_thinking(SamplingParams(thinking_token_budget=5))
    assert (error.value.status, error.value.param) == (400, "thinking_token_budget")


@pytest.mark.parametrize(
    ("parsers", "own", "expected"),
    [
        (["deepseek_r1"], None, 7),
        (["deepseek_r1"], 5, 5),
        ([], None, None),
        (["openai_gptoss"], None, None),
    ],
)
def test_a_budget_of_anthropics_api_applies_where_reasoning_can_be_limited(
    parsers: list[str], own: int | None, expected: int | None
) -> None:
    params = SamplingParams(thinking_token_budget=own)
    MessageFormat(tokenizer(), parsers).parsing(chat().tool_use, []).limit_thinking(params, 7)
    assert params.thinking_token_budget == expected


# Prompts

BEGUN = [*ASKED, {"role": "assistant", "content": " Well, "}]


def test_a_final_message_is_continued_with_its_white_space_at_the_end() -> None:
    assert prompt(messages=BEGUN, continue_final_message=True) == "<user>Hi</user><assistant>Well, "
    assert prompt(messages=BEGUN, add_generation_prompt=False) == "<user>Hi</user><assistant>Well,</assistant>"
    assert prompt(messages=ASKED, continue_final_message=True, add_generation_prompt=False) == "<user>Hi"
    both = refusal(ChatCompletionBody, continue_final_message=True, add_generation_prompt=True)
    assert both == (
        "add_generation_prompt",
        "add_generation_prompt must be false together with continue_final_message: true",
    )
    with pytest.raises(ApiError, match="does not show the last message") as caught:
        prompt(messages=BEGUN, continue_final_message=True, template="{{ messages[0].content }}")
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("content", "expected"), [("<think>So", True), ("<think>So</think>It", None), ("It", None), ("", True)]
)
def test_a_continued_message_continues_its_reasoning(content: str, expected: bool | None) -> None:
    parsing = MessageFormat(tokenizer(), ["deepseek_r1"]).parsing(chat().tool_use, [], content)
    assert parsing.starts_with_reasoning is expected


def test_an_echo_is_the_last_message_if_it_is_the_assistants() -> None:
    assert chat(messages=BEGUN, echo=True).echoed_message == " Well, "
    assert chat(messages=BEGUN).echoed_message == chat(echo=True).echoed_message == ""


def test_a_chat_template_of_a_request_needs_the_servers_permission() -> None:
    fields = {"chat_template": "{{ messages[0].content }}{{ eos_token }}!"}
    with pytest.raises(ApiError, match="--trust-request-chat-template") as caught:
        prompt(**fields)
    assert caught.value.param == "chat_template"
    with pytest.raises(ApiError, match="chat_template_kwargs: chat_template is reserved"):
        prompt(chat_template_kwargs=fields)
    assert prompt(**fields, trusts_templates=True) == "Hi!"
    with pytest.raises(ApiError, match="the request's chat template refuses them: "):
        prompt(chat_template="{% if %}{% endif %}", trusts_templates=True)


def test_documents_need_a_template_that_shows_them() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert prompt(documents=documents, template="{{ documents[0].text }}") == "b"
    with pytest.raises(ApiError, match=r"documents: .* put them into a message"):
        prompt(documents=documents)


def test_a_prompt_is_truncated_to_its_end() -> None:
    assert prompt(truncate_prompt_tokens=11) == "<assistant>"
    assert prompt(truncate_prompt_tokens=1000) == prompt()
    long: Any = [{"role": "user", "content": "x" * 5000}]
    assert len(prompt(messages=long, truncate_prompt_tokens=-1, max_tokens=100)) == 900
    with pytest.raises(ApiError, match="can't fit"):
        prompt(messages=long)
    for count, reason in ((0, "leaves no prompt"), (1001, "is more than the 1000 tokens")):
        with pytest.raises(ApiError, match=f"truncate_prompt_tokens: {count} {reason}"):
            prompt(truncate_prompt_tokens=count)
    for given, kept in ((["abcdef", "g"], [[*b"ef"], [*b"g"]]), ([1, 2, 3], [[2, 3]])):
        body = CompletionBody.model_validate({"model": "m", "prompt": given, "truncate_prompt_tokens": 2})
        assert completion_prompts(body, tokenizer(), 1000) == kept
    with pytest.raises(ApiError, match="too many to truncate"):
        prompt(messages=[{"role": "user", "content": "x" * 2**20}], truncate_prompt_tokens=3)


# Fields without an implementation

NOT_IMPLEMENTED: dict[str, Any] = {
    "use_beam_search": True,
    "length_penalty": 2,
    "best_of": 2,
    "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ",
    "structural_tag": "{}",
    "logits_processors": ["a"],
    "repetition_detection": {"max_pattern_size": 3},
    "truncation_side": "right",
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "prompt_embeds": "abc",
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"video": {}},
    "mm_payload": {"image": []},
    "return_mm_kwargs": {"a": 1},
    "logprob_token_ids": [1],
    "return_prompt_text": True,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
    "ec_transfer_params": {"a": 1},
    "session_id": "a",
    "watermarking": {"key": 1},
}


@pytest.mark.parametrize("body", [ChatCompletionBody, CompletionBody, ResponsesBody, MessagesBody])
@pytest.mark.parametrize("name", sorted(NOT_IMPLEMENTED))
def test_a_field_of_vllm_without_an_implementation_is_refused_by_name(body: type[BaseModel], name: str) -> None:
    param, message = refusal(body, **{name: NOT_IMPLEMENTED[name]})
    assert param == name
    assert "is not supported by this server; leave it out" in message


OF_OTHER_BODIES: list[tuple[type[BaseModel], str, Any]] = [
    (ResponsesBody, "include_reasoning", False),
    (ScoreBody, "instruction", "Find answers."),
    (ScoreBody, "chat_template_kwargs", {"a": 1}),
    (ScoreBody, "max_tokens_per_query", 3),
    (ScoreBody, "max_tokens_per_doc", 3),
    (ScoreBody, "use_activation", False),
    (TokenizeBody, "media_io_kwargs", {"video": {}}),
    (TokenizeBody, "mm_processor_kwargs", {"a": 1}),
]


@pytest.mark.parametrize(("body", "name", "value"), OF_OTHER_BODIES)
def test_a_field_of_other_bodies_without_an_implementation_is_refused_by_name(
    body: type[BaseModel], name: str, value: Any
) -> None:
    given = {"prompt": "a"} if body is TokenizeBody else {}
    param, message = refusal(body, **{name: value}, **given)
    assert param == name
    assert "is not supported by this server; leave it out" in message


def test_an_interval_of_streams_has_vllms_name_too() -> None:
    assert chat(stream_interval=3).streaming_interval == 3
    assert chat(stream_interval=3, streaming_interval=2).streaming_interval == 2
    assert chat().streaming_interval == 1
    assert refusal(ChatCompletionBody, stream_interval=0)[0] == "stream_interval"


@pytest.mark.parametrize("name", ["prompt_logprobs", "enable_response_messages", "previous_input_messages"])
def test_a_response_refuses_what_it_cannot_report(name: str) -> None:
    assert refusal(ResponsesBody, **{name: 1})[0] == name


def test_neutral_and_unknown_fields_are_accepted() -> None:
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "vllm_xargs": {}, "truncation_side": "left"}
    assert chat(**neutral, documents=None, return_mm_kwargs=True, frobnicate=7).use_beam_search is False
    assert chat(thinking_token_budget=-1).thinking_token_budget is None
    assert refusal(ChatCompletionBody, thinking_token_budget=-2)[0] == "thinking_token_budget"


def test_scores_of_prompts_are_not_streamed() -> None:
    assert refusal(ChatCompletionBody, prompt_logprobs=1, stream=True)[0] == "prompt_logprobs"
    assert chat(prompt_logprobs=3, logprobs=True, top_logprobs=1).scored_tokens == 3
    assert chat(prompt_logprobs=0).scored_tokens == 0
    assert chat().scored_tokens is None

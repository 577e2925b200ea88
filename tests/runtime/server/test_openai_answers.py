"""Token ids, echo, responses and structured outputs of OpenAI's API."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]


# Tokens in and out


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_are_returned_on_request(shared_pod: Any, stream: bool) -> None:
    asked = {"model": "chat", "prompt": [19556, 28], "temperature": 0, "max_tokens": 6, "logprobs": 1, "stream": stream}
    fields = {"return_token_ids": True, "return_tokenized_data": True}
    answer = shared_pod.openai.completions.create(**asked, extra_body=fields)
    pieces = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert pieces[0].prompt_token_ids == [19556, 28]
    assert pieces[-1].generation_token_ids == tokens
    assert len(pieces[-1].generation_log_probs) == len(tokens) == 6
    text = "".join(piece.text for piece in pieces)
    assert shared_pod.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_continues_with_exactly_the_earlier_tokens(shared_pod: Any, stream: bool) -> None:
    def tokens_of(text: str) -> list[int]:
        found: list[int] = shared_pod.post("/tokenize", {"prompt": text}).json()["tokens"]
        return found

    asked = {"model": "chat", "messages": STORY, "temperature": 0, "max_tokens": 5, "stream": stream}
    first = shared_pod.openai.chat.completions.create(**asked, extra_body={"return_tokenized_data": True})
    said = [chunk.choices[0].delta for chunk in first][-1] if stream else first.choices[0].message
    assert len(said.generation_token_ids) == 5
    split = [*tokens_of("H"), *tokens_of("ello")]
    assert split != tokens_of("Hello")
    answered = {"role": "assistant", "content": "Hello", "prompt_token_ids": said.prompt_token_ids}
    messages = [*STORY, {**answered, "generation_token_ids": split}, {"role": "user", "content": "And then?"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    kept = shared_pod.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    anew = shared_pod.post("/v1/chat/completions", {**body, "prevent_retokenization": False}).json()["prompt_token_ids"]
    before = len(said.prompt_token_ids)
    assert kept[: before + 2] == [*said.prompt_token_ids, *split]
    assert anew[: before + 1] == [*said.prompt_token_ids, *tokens_of("Hello")]
    assert kept[before + 2 :] == anew[before + 1 :]


def test_an_echoed_prompt_has_the_log_probabilities_of_its_generation(shared_pod: Any) -> None:
    asked = {"model": "chat", "temperature": 0, "logprobs": 2}
    made = shared_pod.openai.completions.create(
        **asked, prompt="Monday, Tuesday,", max_tokens=5, extra_body={"return_token_ids": True}
    ).choices[0]
    whole = [*made.prompt_token_ids, *made.token_ids]
    echoed = shared_pod.openai.completions.create(**asked, prompt=whole, max_tokens=0, echo=True)
    choice = echoed.choices[0]
    assert choice.text == f"Monday, Tuesday,{made.text}"
    assert echoed.usage.completion_tokens == 0
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(whole)
    assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[-5:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text[at : at + 1] for at in choice.logprobs.text_offset] == [t[0] for t in choice.logprobs.tokens]
    plus_one = shared_pod.openai.completions.create(**asked, prompt=whole, max_tokens=1, echo=True).choices[0].logprobs
    assert plus_one.token_logprobs[:-1] == pytest.approx(choice.logprobs.token_logprobs)


@pytest.mark.parametrize("text", ["日本語 🙂", "Ещё نعم", "👩‍👩‍👧 ok"])
def test_joined_bytes_of_tokens_are_the_text_in_any_script(shared_pod: Any, text: str) -> None:
    asked: dict[str, Any] = {"model": "chat", "messages": STORY, "logprobs": True, "top_logprobs": 4}
    choice = shared_pod.openai.chat.completions.create(**asked, extra_body={"guided_choice": [text]}).choices[0]
    assert choice.message.content == text
    tokens = choice.logprobs.content
    assert len(tokens) > 2
    assert bytes(byte for token in tokens for byte in token.bytes) == text.encode()
    for token in tokens:
        assert len({tuple(top.bytes) for top in token.top_logprobs}) == 4


def test_an_echo_opens_a_stream(shared_pod: Any) -> None:
    asked = {"model": "chat", "prompt": "Monday,", "temperature": 0, "max_tokens": 4, "echo": True}
    whole = shared_pod.openai.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in shared_pod.openai.completions.create(**asked, stream=True)]
    assert whole.startswith("Monday,")
    assert "".join(pieces) == whole


@pytest.mark.parametrize("prompt", [["Monday, Tuesday,", "Hello"], [[19556]]])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streamed_echo_has_the_log_probabilities_of_a_whole_one(
    shared_pod: Any, prompt: Any, max_tokens: int
) -> None:
    asked = {"model": "chat", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    whole = shared_pod.openai.completions.create(**asked, n=2)
    chunks = list(shared_pod.openai.completions.create(**asked, n=2, stream=True))
    assert whole.choices
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        parts = [piece.logprobs for piece in mine if piece.logprobs is not None]
        assert "".join(piece.text for piece in mine) == choice.text
        assert [token for part in parts for token in part.tokens] == choice.logprobs.tokens
        assert [at for part in parts for at in part.text_offset] == choice.logprobs.text_offset
        values = [value for part in parts for value in part.token_logprobs]
        assert values[0] is choice.logprobs.token_logprobs[0] is None
        assert values[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
        assert len(mine) > max_tokens


# Responses


def test_a_response_equals_the_answer_of_the_chat(shared_pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "temperature": 0}
    messages = [{"role": "system", "content": "Be brief."}, *STORY]
    chat = shared_pod.openai.chat.completions.create(**asked, messages=messages, max_tokens=12)
    response = shared_pod.openai.responses.create(
        **asked, instructions="Be brief.", input=STORY[0]["content"], max_output_tokens=12, metadata={"a": "b"}
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.metadata == {"a": "b"}


def test_a_response_continues_the_items_of_another(shared_pod: Any) -> None:
    first = shared_pod.openai.responses.create(model="chat", input="Hello", max_output_tokens=3)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    items += [item.model_dump() for item in first.output]
    items += [{"role": "developer", "content": "Shout."}]
    whole = {"max_output_tokens": 3, "extra_body": {"ignore_eos": True}}
    again = shared_pod.openai.responses.create(model="chat", input=items, **whole, top_logprobs=2)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert len(again.output[0].content[0].logprobs) == 3
    assert len(again.output[0].content[0].logprobs[0].top_logprobs) == 2


def test_the_events_of_a_stream_build_the_response(shared_pod: Any) -> None:
    ends_after_six = {"logit_bias": {"2": 100}, "min_tokens": 6}
    asked = {"model": "chat", "input": STORY, "temperature": 0, "max_output_tokens": 8, "extra_body": ends_after_six}
    with shared_pod.openai.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(deltas) > 3
    assert "".join(deltas) == shared_pod.openai.responses.create(**asked).output_text
    assert final.usage.output_tokens == 7


def test_a_stream_of_events_ends_with_its_error(shared_pod: Any) -> None:
    asked = {"input": STORY, "ignore_eos": True, "max_output_tokens": 4000, "stream": True, "timeout": 0.3}
    text = shared_pod.post("/v1/responses", asked).text
    last = json.loads(text.rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "deadline_exceeded"


# Structured outputs


class Lighthouse(BaseModel):
    """The schema of a structured output."""

    name: Literal["Pharos", "Eddystone"]
    metres: int = Field(ge=0, le=999)
    lit: bool


@pytest.mark.parametrize("temperature", [0, 2])
def test_an_answer_matches_a_pydantic_model(shared_pod: Any, temperature: float) -> None:
    asked = {"model": "chat", "messages": STORY, "temperature": temperature, "seed": 7, "max_tokens": 60}
    parsed = shared_pod.openai.chat.completions.parse(**asked, response_format=Lighthouse).choices[0]
    assert isinstance(parsed.message.parsed, Lighthouse)
    assert parsed.finish_reason == "stop"
    with shared_pod.openai.chat.completions.stream(**asked, response_format=Lighthouse) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.message.parsed


def test_a_response_matches_a_pydantic_model(shared_pod: Any) -> None:
    asked = {"model": "chat", "input": STORY, "temperature": 0, "max_output_tokens": 60}
    response = shared_pod.openai.responses.parse(**asked, text_format=Lighthouse)
    assert isinstance(response.output_parsed, Lighthouse)
    assert response.text.format.schema_["title"] == "Lighthouse"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["öffnen", 'say "no"']}, 'öffnen|say "no"'),
        ({"guided_grammar": 'start: "x" pair "x"\npair: "(" pair? ")"'}, r"x[()]{2,}x"),
        ({"guided_json": '{"enum": [1, [2, "b"]]}'}, r'1|\[2, "b"\]'),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["öffnen", "zu"]}}, "öffnen|zu"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"{2}'}}, "xyy"),
        ({"structured_outputs": {"json": {"enum": [1, [2, "b"]]}}}, r'1|\[2, "b"\]'),
    ],
)
def test_an_answer_matches_its_constraint(shared_pod: Any, fields: dict[str, Any], form: str) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "temperature": 1.5, "top_p": 0.9, "seed": 3, "n": 4, **fields}
    for choice in shared_pod.post("/v1/completions", body).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(form, choice["text"])


def test_any_json_object_can_be_requested_by_each_field(shared_pod: Any) -> None:
    for fields in ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}):
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0, **fields}
        assert shared_pod.post("/v1/completions", body).json()["choices"][0]["text"].startswith("{")


def test_constrained_and_unconstrained_answers_run_together(shared_pod: Any) -> None:
    asked = {"model": "chat", "messages": STORY, "temperature": 0, "max_tokens": 20}
    alone = shared_pod.openai.chat.completions.create(**asked)
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(shared_pod.openai.chat.completions.create(**asked)))
    thread.start()
    guided = shared_pod.openai.chat.completions.create(**asked, response_format={"type": "json_object"})
    thread.join(60)
    assert beside[0].choices[0].message.content == alone.choices[0].message.content
    assert guided.choices[0].message.content.startswith("{")

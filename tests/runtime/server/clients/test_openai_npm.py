"""The endpoint with OpenAI's official client from npm."""

from __future__ import annotations

from typing import Any

import pytest
from client_support import node

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def outcome(pod: Any, case: str) -> Any:
    return node.run("openai_client.cjs", f"{pod.http.base_url}/v1", case)


@pytest.fixture(scope="module")
def whole(shared_pod: Any) -> str:
    """The model's answer to another client."""
    asked = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    text: str = shared_pod.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    return text


def test_it_lists_the_model(shared_pod: Any) -> None:
    assert outcome(shared_pod, "models") == ["chat"]


def test_it_gets_whole_answers(shared_pod: Any, whole: str) -> None:
    found = outcome(shared_pod, "plain")
    assert (found["text"], found["ending"]) == (whole, "stop")
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]


def test_it_gets_streams(shared_pod: Any, whole: str) -> None:
    found = outcome(shared_pod, "streamed")
    assert found["text"] == whole
    assert found["pieces"] > 3
    assert found["usage"] == outcome(shared_pod, "plain")["usage"]
    assert outcome(shared_pod, "helper") == {"text": whole, "joined": whole}


def test_a_stream_that_the_client_aborts_ends_in_the_engine(shared_pod: Any) -> None:
    assert outcome(shared_pod, "left") is True
    shared_pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)


def test_it_gets_tool_calls_complete_and_streamed(shared_pod: Any) -> None:
    found = outcome(shared_pod, "tools")
    assert (found["names"], found["ending"]) == (["weather"], "tool_calls")
    assert found["parsed"] == found["streamed"]


def test_it_runs_tools_by_itself(shared_pod: Any) -> None:
    assert outcome(shared_pod, "run") == {"calls": 1, "roles": ["user", "assistant", "tool"]}


def test_it_gets_structured_output(shared_pod: Any) -> None:
    assert outcome(shared_pod, "structured").keys() == {"city", "days"}


def test_it_gets_responses_whole_streamed_and_structured(shared_pod: Any, whole: str) -> None:
    found = outcome(shared_pod, "responses")
    assert (found["text"], found["streamed"], found["last"]) == (whole, whole, "response.completed")
    assert found["parsed"].keys() == {"city", "days"}


def test_it_gets_plain_completions(shared_pod: Any) -> None:
    found = outcome(shared_pod, "completions")
    assert "".join(found["tokens"]) == found["text"]
    assert len(found["tokens"]) == 4


def test_it_distinguishes_errors(shared_pod: Any) -> None:
    assert outcome(shared_pod, "refusals") == {
        "model": {"kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"},
        "field": {"kind": "BadRequestError", "status": 400, "code": None, "param": "temperature"},
        "dimensions": {"kind": "BadRequestError", "status": 400, "code": None, "param": "dimensions"},
    }

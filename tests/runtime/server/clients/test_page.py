"""The web page at ``/``, in a real browser with a real pod: the chat and the panel."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from client_support import node
from client_support.page_actions import CAPITAL, answered, answers, ask, make_model_say, sent_by
from playwright.sync_api import Route, expect

pytestmark = pytest.mark.model


@pytest.fixture
def pod(shared_pod: Any) -> Iterator[Any]:
    """The pod of all tests here; running after each test."""
    yield shared_pod
    if shared_pod.state()["engineState"] != "RUNNING":
        shared_pod.signal("unpause")


# The chat


def test_a_question_is_answered(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page)
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_label("Temperature").fill("0")
    ask(page, CAPITAL)
    answer = answered(page)
    expect(answer).to_contain_text("Paris")
    expect(answer.locator(".note")).to_contain_text("per second")
    expect(page.get_by_label("Your message")).to_be_focused()
    expect(page.get_by_label("Your message")).to_have_value("")
    assert [(body["temperature"], body["max_tokens"]) for body in bodies] == [(0, 1024)]


def test_an_answer_streams_and_can_be_stopped(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    make_model_say(page, "word " * 400)
    ask(page, "Say it.")
    words = answers(page).locator(".text")
    expect(words).to_contain_text("word word")
    some = len(words.inner_text())
    page.wait_for_function("length => document.querySelector('.assistant .text').innerText.length > length", arg=some)
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.get_by_role("meter")).not_to_have_attribute("aria-valuenow", "0")
    page.get_by_role("button", name="Stop").click()
    expect(answered(page).locator(".note")).to_contain_text("stopped after")
    pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)


def test_a_conversation_continues_until_a_new_one_begins(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page)
    make_model_say(page, "Noted.")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Maximum tokens").fill("20")
    page.get_by_label("Temperature").fill("0.3")
    ask(page, "My name is Ada.")
    answered(page)
    page.reload()
    ask(page, "What is my name?")
    answered(page, 2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_label("System prompt").fill("")
    ask(page, "Who am I?")
    answered(page)
    said = [[message["content"] for message in body["messages"]] for body in bodies]
    assert said == [
        ["Be short.", "My name is Ada."],
        ["Be short.", "My name is Ada.", "Noted.", "What is my name?"],
        ["Who am I?"],
    ]
    assert [(body["max_tokens"], body["temperature"]) for body in bodies] == [(20, 0.3)] * 3


def test_shift_and_enter_begin_a_new_line(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page)
    make_model_say(page, "Three.")
    question = page.get_by_label("Your message")
    question.press_sequentially("one")
    question.press("Shift+Enter")
    question.press_sequentially("two")
    question.press("Enter")
    answered(page)
    assert bodies[0]["messages"][-1]["content"] == "one\ntwo"
    expect(page.locator(".turn.user .text")).to_have_text("one\ntwo", use_inner_text=True)


def test_html_in_an_answer_is_shown_as_text(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    script = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"><b>bold</b>"
    make_model_say(page, f"{script}\n```html\n{script}\n```\nSo it is.")
    ask(page, script)
    answer = answered(page)
    expect(answer.locator(".text").first).to_have_text(script)
    expect(answer.locator("pre code")).to_have_text(script)
    expect(answer.locator(".text").last).to_have_text("So it is.")
    expect(page.locator(".turn.user .text")).to_have_text(script)
    expect(page.locator(".turn script, .turn img, .turn b")).to_have_count(0)
    assert page.title() == "chat – Megatron inference"


def test_an_invalid_setting_shows_the_error_of_the_server(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    page.get_by_label("Temperature").fill("9")
    ask(page, CAPITAL)
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    expect(page.get_by_label("Your message")).to_have_value(CAPITAL)
    expect(page.locator(".turn")).to_have_count(0)


# The service


@pytest.mark.parametrize("state", ["paused", "suspended"])
def test_a_question_waits_while_the_model_is_paused_or_suspended(pod: Any, open_page: Any, state: str) -> None:
    page = open_page(pod)
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_label("Temperature").fill("0")
    pod.signal("pause")
    if state == "suspended":
        pod.signal("suspend")
    expect(page.locator("#state")).to_have_text(state)
    expect(page.locator(".replica-groups .state")).to_have_text(state)
    ask(page, CAPITAL)
    expect(answers(page).locator(".note")).to_have_text(f"waits: the model is {state}")
    expect(page.locator("#waiting")).to_have_text("1")
    if state == "suspended":
        pod.signal("resume")
    pod.signal("unpause")
    expect(page.locator("#state")).to_have_text("running")
    expect(answered(page)).to_contain_text("Paris")


def test_a_hidden_page_sends_no_requests(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    expect(page.locator("#state")).to_have_text("running")
    hide = "state => { Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, "hidden")
    page.wait_for_load_state("networkidle")
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.wait_for_timeout(1500)
    assert seen == []
    with page.expect_request("**/status"):
        page.evaluate(hide, "visible")


def test_a_question_before_the_first_status_is_answered(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    unanswered: list[Route] = []
    page.route("**/status", lambda route: route.fallback() if unanswered else unanswered.append(route))
    page.reload()
    make_model_say(page, "At once.")
    ask(page, "Quick!")
    expect(answered(page)).to_contain_text("At once.")
    assert len(unanswered) == 1


def test_a_phone_shows_the_service_when_asked(pod: Any, open_page: Any) -> None:
    page = open_page(pod, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    button = page.get_by_role("button", name="Service")
    expect(page.locator("#panel")).to_be_hidden()
    button.tap()
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_text("Replica group 0")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    button.tap()
    expect(page.get_by_label("Your message")).to_be_visible()


def test_an_interrupted_answer_is_kept_with_the_reason(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    make_model_say(page, "word " * 400)
    ask(page, "Say it.")
    expect(answers(page).locator(".text")).to_contain_text("word word")
    for pid, command in pod.children().items():
        if "server.frontend" in command:
            os.kill(pid, signal.SIGKILL)
    expect(answered(page).locator(".note")).to_contain_text("The connection was lost before the answer was complete.")
    expect(answers(page).locator(".text")).to_contain_text("word word")
    page.unroute_all()
    make_model_say(page, "Better.")
    ask(page, "And now?")
    expect(answered(page, 2)).to_contain_text("Better.")


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(pod: Any, open_page: Any, scheme: str, width: int) -> None:
    # The page's content security policy would block the checker.
    page = open_page(pod, color_scheme=scheme, viewport={"width": width, "height": 700}, bypass_csp=True)
    make_model_say(page, "Thus:\n```python\nprint(1)\n```\nand `done`.")
    ask(page, "Show me.")
    answered(page)
    page.add_script_tag(path=node.find(os.environ) / "axe-core" / "axe.min.js")
    views = [lambda: None] if width > 1000 else [lambda: None, page.get_by_role("button", name="Service").click]
    for show in views:
        show()
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 20
        violations = [(each["id"], [part["html"] for part in each["nodes"]]) for each in found["violations"]]
        assert violations == []

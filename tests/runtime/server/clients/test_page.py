"""The page at ``/`` as people use it, in a real browser on a real pod."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_support import node
from playwright.sync_api import Page, Route, expect
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.model

KEY = "key-of-the-tests"
CAPITAL = "What is the capital of France?"
ENDLESS = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def pod(shared_pod: Any) -> Iterator[Any]:
    """The pod of all tests here, which serves again after each."""
    yield shared_pod
    if shared_pod.state()["engineState"] != "RUNNING":
        shared_pod.signal("unpause")


def ask(page: Page, words: str) -> None:
    page.get_by_label("Your message").fill(words)
    page.keyboard.press("Enter")


def answers(page: Page) -> Any:
    return page.locator(".turn.assistant")


def answered(page: Page, count: int = 1) -> Any:
    """The latest answer, once it is complete."""
    expect(answers(page)).to_have_count(count)
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false")
    return last


def sent_by(page: Page) -> list[dict[str, Any]]:
    """The bodies of what the page asks from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    return bodies


def make_model_say(page: Page, words: str) -> None:
    """Has the model answer with these words and no others."""

    def change(route: Route) -> None:
        body = {**route.request.post_data_json, "guided_choice": [words]}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)


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


def test_an_answer_is_seen_to_grow_and_can_be_stopped(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    make_model_say(page, "word " * 400)
    ask(page, "Say it.")
    words = answers(page).locator(".words")
    expect(words).to_contain_text("word word")
    some = len(words.inner_text())
    page.wait_for_function("length => document.querySelector('.assistant .words').innerText.length > length", arg=some)
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.get_by_role("meter")).not_to_have_attribute("aria-valuenow", "0")
    page.get_by_role("button", name="Stop").click()
    expect(answered(page).locator(".note")).to_contain_text("stopped after")
    pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)


def test_a_conversation_goes_on_until_a_new_one_begins(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page)
    make_model_say(page, "Noted.")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Most tokens").fill("20")
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
    expect(page.locator(".turn.user .words")).to_have_text("one\ntwo", use_inner_text=True)


def test_what_a_model_writes_is_shown_as_text(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    script = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"><b>bold</b>"
    make_model_say(page, f"{script}\n```html\n{script}\n```\nSo it is.")
    ask(page, script)
    answer = answered(page)
    expect(answer.locator(".words").first).to_have_text(script)
    expect(answer.locator("pre code")).to_have_text(script)
    expect(answer.locator(".words").last).to_have_text("So it is.")
    expect(page.locator(".turn.user .words")).to_have_text(script)
    expect(page.locator(".turn script, .turn img, .turn b")).to_have_count(0)
    assert page.title() == "chat – Megatron inference"


def test_a_wrong_setting_is_told_in_the_words_of_the_server(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    page.get_by_label("Temperature").fill("9")
    ask(page, CAPITAL)
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    expect(page.get_by_label("Your message")).to_have_value(CAPITAL)
    expect(page.locator(".turn")).to_have_count(0)


# The service


@pytest.mark.parametrize("state", ["paused", "suspended"])
def test_a_question_waits_while_the_model_rests(pod: Any, open_page: Any, state: str) -> None:
    page = open_page(pod)
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_label("Temperature").fill("0")
    pod.signal("pause")
    if state == "suspended":
        pod.signal("suspend")
    expect(page.locator("#state")).to_have_text(state)
    expect(page.locator(".replicas .state")).to_have_text(state)
    ask(page, CAPITAL)
    expect(answers(page).locator(".note")).to_have_text(f"waits: the model is {state}")
    expect(page.locator("#waiting")).to_have_text("1")
    if state == "suspended":
        pod.signal("resume")
    pod.signal("unpause")
    expect(page.locator("#state")).to_have_text("running")
    expect(answered(page)).to_contain_text("Paris")


def test_a_hidden_page_asks_for_nothing(pod: Any, open_page: Any) -> None:
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


def test_whoever_asks_before_the_service_was_seen_is_answered(pod: Any, open_page: Any) -> None:
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
    expect(page.get_by_text("Replica 0")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    button.tap()
    expect(page.get_by_label("Your message")).to_be_visible()


def test_an_answer_that_breaks_off_is_kept_with_the_reason(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    make_model_say(page, "word " * 400)
    ask(page, "Say it.")
    expect(answers(page).locator(".words")).to_contain_text("word word")
    for pid, command in pod.children().items():
        if "server.frontend" in command:
            os.kill(pid, signal.SIGKILL)
    expect(answered(page).locator(".note")).to_contain_text("The connection broke before the answer was complete.")
    expect(answers(page).locator(".words")).to_contain_text("word word")
    page.unroute_all()
    make_model_say(page, "Better.")
    ask(page, "And now?")
    expect(answered(page, 2)).to_contain_text("Better.")


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_and_used_by_all(pod: Any, open_page: Any, scheme: str, width: int) -> None:
    # Past the page's own policy, which would not let the checker in.
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
        complaints = [(each["id"], [part["html"] for part in each["nodes"]]) for each in found["violations"]]
        assert complaints == []


# Refusals


@pytest.fixture(scope="module")
def locked_pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod that asks for a key and works on one request at a time; the last test ends it."""
    folder: Path = tmp_path_factory.mktemp("pod")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_tiny_checkpoint(folder / "tiny", longest=256, chat_template=template)
    flags = "--dtype float32 --kv-cache-memory 16Mi --frontend-replicas 1 --max-in-flight 1"
    pod = pod_type(folder, "--model", str(model), *flags.split(), MEGATRON_API_KEYS_FILE=str(keys))
    try:
        pod.wait_ready()
        pod.http.headers["Authorization"] = f"Bearer {KEY}"
        yield pod
    finally:
        pod.end()


def give_key(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use it").click()


def test_the_page_asks_for_the_key_and_forgets_it_with_the_tab(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    expect(page.get_by_text("This server asks for an API key.")).to_be_visible()
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    expect(page.locator("#state")).to_have_text("locked")
    give_key(page, "wrong")
    expect(page.get_by_text("The server does not take this API key.")).to_be_visible()
    give_key(page, KEY)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#key-form")).to_be_hidden()
    page.reload()
    expect(page.locator("#state")).to_have_text("running")
    assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    ask(page, "abc")
    answered(page)
    page.get_by_role("button", name="Forget the API key").click()
    expect(page.locator("#state")).to_have_text("locked")
    assert KEY not in page.evaluate("JSON.stringify(sessionStorage)")


def test_a_question_waits_for_a_replica_to_come_back(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator(".replicas li")).to_have_count(1)
    os.kill(locked_pod.child("megatron_runtime.rank"), signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("no replica")
    expect(page.locator(".replicas li")).to_have_count(0)
    ask(page, "abc")
    expect(answers(page).locator(".note")).to_have_text("waits for a replica of the model")
    answered(page)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator(".replicas li")).to_have_count(1)


def test_a_server_that_ends_its_work_says_so(start_pod: Any, smollm2_path: Path, open_page: Any) -> None:
    pod = start_pod("--model", str(smollm2_path), "--kv-cache-memory", "256Mi", "--frontend-replicas", "1").wait_ready()
    page = open_page(pod)
    expect(page.locator("#state")).to_have_text("running")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(pod.post, "/v1/completions", {**ENDLESS, "max_tokens": 8000})
        pod.wait_for(lambda state: state["requests"]["running"] == 1)
        pod.process.send_signal(signal.SIGTERM)
        pod.wait_for(lambda state: state["draining"])
        ask(page, CAPITAL)
        words = "The server can't answer now: the server is shutting down. Try again in 5 s."
        expect(page.get_by_role("alert")).to_have_text(words)
        expect(page.get_by_label("Your message")).to_have_value(CAPITAL)
        pod.end()
        assert other.exception() is not None


def test_a_busy_server_and_one_that_is_gone_are_told_from_each_other(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator("#state")).to_have_text("running")
    locked_pod.signal("pause")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(locked_pod.post, "/v1/completions", ENDLESS)
        locked_pod.wait_for(lambda state: state["requests"]["waiting"] == 1)
        ask(page, "abc")
        expect(page.get_by_role("alert")).to_contain_text("The server is busy")
        expect(page.get_by_role("alert")).to_contain_text("Try again in 5 s.")
        expect(page.get_by_label("Your message")).to_have_value("abc")
        locked_pod.process.send_signal(signal.SIGTERM)
        assert other.result().status_code == 503
    expect(page.locator("#state")).to_have_text("unreachable")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server can't be reached.")

"""The web page at ``/``, in a real browser with a real pod: the chat and the panel."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from client_support import node
from client_support.page_actions import CAPITAL, answered, answers, ask, make_model_say, sent_by
from client_support.page_checks import faint_borders, focus_order, reading_order
from playwright.sync_api import Route, expect

ENDLESS = "word " * 1500
LONGER_THAN_ENDLESS = "7600"
SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"><b>bold</b>"
MARKDOWN = f"""# Title

Some *slanted*, **heavy**, ~~old~~ text with `code`
on two lines, {SCRIPT}

- one
  1. nested
- two

> a quote

| left | right |
|------|------:|
| a | 1 |

```python
print("1 < 2")
```

[site](https://example.com "there"), https://example.org, [bad](javascript:document.title='taken'),
[local](/status), ![picture](https://example.com/x.png)

---
End."""


@pytest.fixture
def pod(tiny_pod: Any) -> Iterator[Any]:
    """The pod of all tests here; running after each test."""
    yield tiny_pod
    if tiny_pod.state()["engineState"] != "RUNNING":
        tiny_pod.signal("unpause")


# The chat


def test_a_question_is_answered(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page, "/v1/chat/completions")
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_label("Temperature").fill("0")
    make_model_say(page, "Paris.")
    ask(page, CAPITAL)
    answer = answered(page)
    expect(answer.locator(".content")).to_have_text("Paris.")
    expect(answer.locator(".note")).to_contain_text("per second")
    expect(page.get_by_label("Your message")).to_be_focused()
    expect(page.get_by_label("Your message")).to_have_value("")
    assert [(body["temperature"], body["max_tokens"]) for body in bodies] == [(0, 1024)]
    page.get_by_label("Temperature").fill("9")
    ask(page, CAPITAL)
    rule = "Temperature must be a number from 0 to 2."
    expect(page.get_by_role("alert")).to_have_text(rule)
    expect(page.locator("#temperature-error")).to_have_text(rule)
    expect(page.get_by_label("Your message")).to_have_value(CAPITAL)
    assert len(bodies) == 1


def test_an_answer_streams_and_can_be_stopped(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    page.get_by_label("Maximum length").fill(LONGER_THAN_ENDLESS)
    make_model_say(page, ENDLESS)
    ask(page, "Say it.")
    content = answers(page).locator(".content")
    expect(content).to_contain_text("word word")
    some = len(content.inner_text())
    page.wait_for_function("size => document.querySelector('.assistant .content').innerText.length > size", arg=some)
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.get_by_role("meter")).not_to_have_attribute("aria-valuenow", "0")
    page.keyboard.press("Escape")
    expect(answered(page).locator(".note")).to_contain_text("stopped after")
    pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)
    ask(page, "And again.")
    expect(answers(page).last.locator(".content")).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(answered(page, 2).locator(".note")).to_contain_text("stopped after")
    expect(page.get_by_label("Your message")).to_be_focused()
    pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)


def test_messages_are_retried_edited_and_restored(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    bodies = sent_by(page, "/v1/chat/completions")
    make_model_say(page, "Noted.")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Maximum length").fill("20")
    page.get_by_label("Temperature").fill("0.3")
    question = page.get_by_label("Your message")
    question.press_sequentially("I am")
    question.press("Shift+Enter")
    question.press_sequentially("Ada.")
    question.press("Enter")
    answered(page)
    expect(page.locator(".turn.user .content")).to_have_text("I am\nAda.", use_inner_text=True)
    page.reload()
    ask(page, "Who am I?")
    answered(page, 2)
    page.get_by_role("button", name="Retry this answer").last.click()
    answered(page, 2)
    page.get_by_role("button", name="Edit this message").first.click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit this message").first).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Edit your message").fill("I am Bob.")
    page.keyboard.press("Enter")
    answered(page, 1)
    expect(page.get_by_text("2 later messages were removed.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    page.reload()
    expect(page.locator(".turn.user .content").first).to_have_text("I am\nAda.", use_inner_text=True)
    expect(answers(page).last.locator(".note")).to_contain_text("token")
    said = [" / ".join(message["content"] for message in body["messages"]) for body in bodies]
    again = "Be short. / I am\nAda. / Noted. / Who am I?"
    assert said == ["Be short. / I am\nAda.", again, again, "Be short. / I am Bob."]
    assert [(body["max_tokens"], body["temperature"]) for body in bodies] == [(20, 0.3)] * 4


def test_an_answer_is_rendered_as_markdown_and_copied(pod: Any, open_page: Any) -> None:
    page = open_page(pod, permissions=["clipboard-read", "clipboard-write"])
    make_model_say(page, MARKDOWN)
    ask(page, SCRIPT)
    content = answered(page).locator(".content")
    for selector, text in {
        "h3": "Title",
        "em": "slanted",
        "strong": "heavy",
        "s": "old",
        "p > code": "code",
        "ul > li > ol > li": "nested",
        "blockquote p": "a quote",
        "th.right": "right",
        "td.right": "1",
        "pre code": 'print("1 < 2")\n',
        ".code-bar span": "python",
        'a[title="there"]': "site",
    }.items():
        expect(content.locator(selector)).to_have_text(text)
    expect(content).to_contain_text(SCRIPT)
    expect(page.locator(".turn.user .content")).to_have_text(SCRIPT)
    links = content.locator("a").evaluate_all("all => all.map(each => [each.href, each.target, each.rel])")
    opener = ["_blank", "noopener noreferrer nofollow"]
    urls = ["https://example.com/", "https://example.org/", "https://example.com/x.png"]
    assert links == [[url, *opener] for url in urls]
    expect(page.locator(".turn :is(script, img, b)")).to_have_count(0)
    assert page.title() == "chat – Megatron inference"
    copied = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate(copied) == 'print("1 < 2")\n'
    page.get_by_role("button", name="Copy this answer").click()
    expect(page.locator("#announcement")).to_have_text("Copied.")
    assert page.evaluate(copied) == MARKDOWN
    # As on a page from plain HTTP on another machine.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.locator("[data-action=copy-code]").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Your message").press("Control+V")
    expect(page.get_by_label("Your message")).to_have_value('print("1 < 2")')
    expect(page.get_by_role("button", name="Copy code")).to_be_visible()


# The service


@pytest.mark.parametrize("state", ["paused", "suspended"])
def test_a_question_waits_while_the_model_is_paused_or_suspended(pod: Any, open_page: Any, state: str) -> None:
    page = open_page(pod)
    expect(page.locator("#state")).to_have_text("running")
    make_model_say(page, "Paris.")
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
    expect(answered(page)).to_contain_text("Paris.")


def test_the_rate_of_an_answer_ignores_a_pause(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    page.add_init_script(
        "const now = performance.now.bind(performance); performance.now = () => now() + (window.late ?? 0)"
    )
    page.reload()
    page.get_by_label("Maximum length").fill(LONGER_THAN_ENDLESS)
    make_model_say(page, ENDLESS)
    ask(page, "Say it.")
    expect(answers(page).locator(".content")).to_contain_text("word word")
    pod.signal("pause")
    note = answers(page).locator(".note")
    expect(note).to_contain_text("waits: the model is paused")
    page.evaluate("window.late = 3_600_000")
    tokens = int(note.inner_text().split()[0])
    pod.signal("unpause")
    # Some may have been on their way to the page.
    grown = "tokens => parseInt(document.querySelector('.assistant .note').textContent) > tokens + 30"
    page.wait_for_function(grown, arg=tokens)
    page.keyboard.press("Escape")
    answered(page)
    # One hour would make it about 0.02.
    assert float(note.inner_text().split(", ")[1].removesuffix(" per second")) > 0.1


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


def test_an_interrupted_answer_is_kept_with_the_reason(pod: Any, open_page: Any) -> None:
    page = open_page(pod)
    page.get_by_label("Maximum length").fill(LONGER_THAN_ENDLESS)
    make_model_say(page, ENDLESS)
    ask(page, "Say it.")
    expect(answers(page).locator(".content")).to_contain_text("word word")
    for pid, command in pod.children().items():
        if "server.frontend" in command:
            os.kill(pid, signal.SIGKILL)
    expect(answered(page).locator(".note")).to_contain_text("The connection was lost before the answer was complete.")
    expect(answers(page).locator(".content")).to_contain_text("word word")
    page.unroute_all()
    make_model_say(page, "Better.")
    ask(page, "And now?")
    expect(answered(page, 2)).to_contain_text("Better.")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_the_page_is_accessible(pod: Any, open_page: Any, scheme: str, width: int) -> None:
    # The page's content security policy would block the checker.
    page = open_page(pod, color_scheme="light", viewport={"width": width, "height": 700}, bypass_csp=True)
    make_model_say(page, "Thus:\n```python\nprint(1)\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> and `done`.")
    for count in (1, 2):
        ask(page, "Show me.")
        answered(page, count)
    page.get_by_role("button", name="Retry this answer").last.click()
    answered(page, 2)
    page.add_script_tag(path=node.find(os.environ) / "axe-core" / "axe.min.js")
    button = page.get_by_role("button", name="Service")
    assert button.is_visible() == (width < 1000)
    for shows in ("chat", "panel") if button.is_visible() else ("both",):
        if shows == "panel":
            button.click()
            expect(button).to_have_attribute("aria-expanded", "true")
            expect(page.get_by_text("Replica group 0")).to_be_visible()
        page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        assert faint_borders(page) == []
        page.emulate_media(color_scheme=scheme)
        assert faint_borders(page) == []
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 20
        violations = [(each["id"], [part["html"] for part in each["nodes"]]) for each in found["violations"]]
        assert violations == []
        stops = focus_order(page)
        assert len(stops) >= 5
        assert stops == reading_order(stops)
        assert page.evaluate("document.documentElement.scrollWidth") == width

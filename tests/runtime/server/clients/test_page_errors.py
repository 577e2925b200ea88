"""The web page at ``/``, in a real browser with a real pod: API keys, and servers that can't answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_support.page_actions import answered, answers, ask, make_model_say, sent_by
from playwright.sync_api import Page, expect
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

KEY = "key-of-the-tests"
LONGEST = 256
SHORT = {"prompt": "a", "max_tokens": 9}
LARGE = {"model": "chat", "prompt": "a", "max_tokens": LONGEST - 1, "n": 128, "ignore_eos": True, "stream": True}
"""Its answer has more than 4 MiB: the request goes on until the client reads."""


@pytest.fixture(scope="module")
def locked_pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod that requires a key and admits one request at a time; the last test stops it."""
    folder: Path = tmp_path_factory.mktemp("pod")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_tiny_checkpoint(folder / "tiny", longest=LONGEST, chat_template=template)
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
    page.get_by_role("button", name="Apply").click()


def test_the_page_requests_the_key_and_stores_it_only_in_the_tab(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    expect(page.get_by_text("This server requires an API key.")).to_be_visible()
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    expect(page.locator("#state")).to_have_text("API key required")
    give_key(page, "wrong")
    expect(page.get_by_text("The server rejected this API key.")).to_be_visible()
    give_key(page, KEY)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#key-form")).to_be_hidden()
    page.reload()
    expect(page.locator("#state")).to_have_text("running")
    assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    ask(page, "abc")
    answered(page)
    page.get_by_role("button", name="Remove the API key").click()
    expect(page.locator("#state")).to_have_text("API key required")
    assert KEY not in page.evaluate("JSON.stringify(sessionStorage)")


def test_a_question_waits_for_a_replica_group(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator(".replica-groups li")).to_have_count(1)
    servers = locked_pod.processes("fork_server_process")
    for server in servers:
        os.kill(server, signal.SIGSTOP)  # so that no other rank starts
    os.kill(locked_pod.child("megatron_runtime.rank"), signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("no replica group")
    expect(page.locator(".replica-groups li")).to_have_count(0)
    ask(page, "abc")
    expect(answers(page).locator(".note")).to_have_text("waits for a replica group")
    for server in servers:
        os.kill(server, signal.SIGCONT)
    answered(page)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator(".replica-groups li")).to_have_count(1)


def test_a_full_context_drops_the_oldest_messages(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator("#state")).to_have_text("running")
    bodies = sent_by(page, "/v1/chat/completions")
    page.get_by_label("Maximum length").fill("80")
    make_model_say(page, "b" * 60)
    for count in (1, 2, 3):
        ask(page, str(count) * 60)
        answered(page, count)
    divider = page.locator(".divider")
    expect(divider).to_contain_text("The messages above no longer fit the model's context")
    order = "all => all.map(node => node.className.split(' ')[1] ?? 'divider')"
    turns = ["user", "assistant"]
    assert page.locator("#messages > li").evaluate_all(order) == [*turns, "divider", *turns, *turns]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 3]
    assert [body["max_tokens"] for body in bodies] == [80, 76, 76]
    page.reload()
    expect(divider).to_have_count(1)
    page.unroute_all()
    make_model_say(page, "c" * 100)
    ask(page, "4" * 200)
    expect(answered(page, 4).locator(".note")).to_contain_text("stopped: the model's context is full")
    assert bodies[-1]["max_tokens"] == LONGEST - 200
    ask(page, "5" * 300)
    words = f"Your message is too long: it makes a prompt of 300 tokens, and the model's context has {LONGEST}."
    expect(page.get_by_role("alert")).to_have_text(f"{words} Shorten it.")
    expect(page.get_by_label("Your message")).to_have_value("5" * 300)
    page.get_by_label("Maximum length").fill("5")
    ask(page, "short")
    expect(answered(page, 5).locator(".note")).to_contain_text("stopped: it reached the maximum length")


def test_busy_draining_and_unreachable_servers_have_different_errors(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator("#state")).to_have_text("running")
    alert = page.get_by_role("alert")
    with locked_pod.http.stream("POST", "/v1/completions", json=LARGE) as other:
        refused = locked_pod.http.post("/v1/completions", json={"model": "chat", **SHORT})
        assert refused.status_code == 429
        ask(page, "abc")
        expect(alert).to_have_text("The server is busy with other requests. Try again in 5 s.")
        expect(page.get_by_label("Your message")).to_have_value("abc")
        locked_pod.process.send_signal(signal.SIGTERM)
        locked_pod.wait_for(lambda state: state["draining"])
        page.keyboard.press("Enter")
        expect(alert).to_have_text("The server is shutting down. Try again in 5 s.")
        other.read()
        assert other.status_code == 200
    expect(page.locator("#state")).to_have_text("not reachable")
    page.keyboard.press("Enter")
    expect(alert).to_have_text("The server can't be reached. Check your connection.")

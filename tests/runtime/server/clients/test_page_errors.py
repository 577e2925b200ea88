"""The web page at ``/``, in a real browser with a real pod: API keys, and servers that can't answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_support.page_actions import CAPITAL, answered, answers, ask
from playwright.sync_api import Page, expect
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.model

KEY = "key-of-the-tests"
ENDLESS = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def locked_pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod that requires a key and admits one request at a time; the last test stops it."""
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
    page.get_by_role("button", name="Apply").click()


def test_the_page_requests_the_key_and_stores_it_only_in_the_tab(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    expect(page.get_by_text("This server requires an API key.")).to_be_visible()
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    expect(page.locator("#state")).to_have_text("locked")
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
    expect(page.locator("#state")).to_have_text("locked")
    assert KEY not in page.evaluate("JSON.stringify(sessionStorage)")


def test_a_question_waits_for_a_replica_group(locked_pod: Any, open_page: Any) -> None:
    page = open_page(locked_pod)
    give_key(page, KEY)
    expect(page.locator(".replica-groups li")).to_have_count(1)
    os.kill(locked_pod.child("megatron_runtime.rank"), signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("no replica group")
    expect(page.locator(".replica-groups li")).to_have_count(0)
    ask(page, "abc")
    expect(answers(page).locator(".note")).to_have_text("waits for a replica group")
    answered(page)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator(".replica-groups li")).to_have_count(1)


def test_a_draining_server_is_reported(start_pod: Any, smollm2_path: Path, open_page: Any) -> None:
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


def test_a_busy_and_an_unreachable_server_have_different_errors(locked_pod: Any, open_page: Any) -> None:
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

"""Fixtures of the tests with other people's clients: a browser, and pages in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "cluster"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # client_support and cluster_support lie there; importlib mode puts nothing on it

from client_support import chromium  # noqa: E402

WAIT_MS = 30_000
"""How long the page may take to come to what a test expects."""
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; fails, never skips, where it was not fetched.

    Not for the whole session: Playwright keeps an event loop running, beside which no asynchronous test can have one.
    """
    program = chromium.find(os.environ)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(chromium.FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a pod in a browser that knows nothing yet; it must neither fail nor leave the pod."""
    failures: list[str] = []
    contexts = []

    def open_one(pod: Any, **settings: Any) -> Page:
        def leaves(request: Request) -> None:
            if not request.url.startswith(str(pod.http.base_url)):
                failures.append(f"asked for {request.url}")

        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", leaves)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda said: failures.append(said.text) if "Security Policy" in said.text else None)
        page.goto(str(pod.http.base_url))
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert failures == []

"""Fixtures of the tests with external clients: a browser, and pages in it."""

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
        sys.path.append(str(folder))  # for client_support and cluster_support; pytest's importlib mode does not add
        # them

from client_support import chromium  # noqa: E402

WAIT_MS = 30_000
"""Time for the page to reach the state that a test expects, in milliseconds."""
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; the tests fail, and are not skipped, if it is missing.

    Not for the whole session: Playwright keeps an event loop running, which would block asynchronous tests.
    """
    program = chromium.find(os.environ)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(chromium.FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a pod in a new browser context; fails for errors of the page and for requests to other
    hosts."""
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

"""Actions on the web page at ``/``, and its content."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Route, expect

CAPITAL = "What is the capital of France?"


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Any:
    return page.locator(".turn.assistant")


def answered(page: Page, count: int = 1) -> Any:
    """The latest answer, once it is complete."""
    expect(answers(page)).to_have_count(count)
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false")
    return last


def sent_by(page: Page, path: str) -> list[dict[str, Any]]:
    """The bodies of the requests that the page sends to a path from now on."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.url.endswith(path) else None)
    return bodies


def make_model_say(page: Page, text: str) -> None:
    """Makes the model answer with exactly this text."""

    def change(route: Route) -> None:
        body = {**route.request.post_data_json, "guided_choice": [text]}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)

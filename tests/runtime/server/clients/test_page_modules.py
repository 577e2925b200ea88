"""The modules of the page that need no browser, and the library that it ships."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from client_support import node

from megatron_runtime.server.page_routes import FOLDER

VENDOR = FOLDER / "vendor"
LIBRARY = "markdown-it.esm.min.mjs"


def call(case: str) -> Any:
    return node.run("page_modules.mjs", str(FOLDER), case)


def test_a_conversation_is_fitted_into_the_context() -> None:
    whole = "q1 a1 q2 a2 q3 a3 q4 a4 q5"
    told = call("context")
    assert told["everything"] == {"sent": whole, "dropped": 0, "maxTokens": 20, "counts": 1}
    assert told["justEnough"] == {"sent": whole, "dropped": 0, "maxTokens": 20, "counts": 1}
    assert told["one"] == {"sent": "q2 a2 q3 a3 q4 a4 q5", "dropped": 1, "maxTokens": 20, "counts": 4}
    assert told["two"] == {"sent": "q3 a3 q4 a4 q5", "dropped": 2, "maxTokens": 20, "counts": 4}
    assert told["all"] == {"sent": "q5", "dropped": 4, "maxTokens": 20, "counts": 4}
    assert told["sticky"] == {"sent": "q4 a4 q5", "dropped": 3, "maxTokens": 20, "counts": 1}
    assert told["system"]["sent"] == "s q4 a4 q5"
    assert (told["short"]["sent"], told["short"]["maxTokens"]) == (whole, 2)
    # A quarter of the context suffices, so that a high maximum does not drop the whole conversation.
    assert (told["quarter"]["sent"], told["quarter"]["maxTokens"]) == (whole, 30)
    assert (told["tight"]["sent"], told["tight"]["maxTokens"]) == ("q5", 2)


def test_a_message_that_leaves_no_room_for_an_answer_is_rejected() -> None:
    told = call("context")
    sizes = "Your message is too long: it makes a prompt of {} tokens, and the model's context has {}."
    assert told["tooLong"]["error"] == f"{sizes.format(10, 10)} Shorten it."
    assert told["tooLongWithSystem"]["error"] == f"{sizes.format(20, 15)} Shorten it or the system prompt."


def test_rates_ignore_pauses() -> None:
    told = call("rates")
    assert told["seen"] == [None, 10, 10]
    assert told["metered"] == [0, 10, 0, 0, 10, 0]
    assert told["words"] == ["1 token", "12 tokens, 3.3 per second", "12 tokens, 33 per second"]


def test_errors_are_in_the_words_of_the_page() -> None:
    assert call("errors") == [
        "This server requires an API key.",
        "The server rejected this API key.",
        "The server is busy with other requests. Try again in 5 s.",
        "The server is shutting down. Try again in 5 s.",
        "The model is stopped. Try again later.",
        "The conversation is longer than the model's context. Shorten your message, or start a new chat.",
        "Temperature is not accepted by the server: must be at most 2",
        "The server did not accept the request: min_p: must be at most 1",
        "The server failed to answer. Try again; the cause is in the log of the server.",
        "The server can't be reached through its proxy. Try again later.",
        "The server did not accept the request: status 418",
        "The answer took longer than this server permits.",
        "The server failed to answer. Try again; the cause is in the log of the server.",
    ]


def test_the_library_and_its_licenses_are_those_of_the_npm_package() -> None:
    packages = node.find(os.environ)
    published = packages / "markdown-it" / "dist" / "browser" / LIBRARY
    assert (VENDOR / LIBRARY).read_bytes() == published.read_bytes()
    sources = json.loads((published.parent / f"{LIBRARY}.map").read_text())["sources"]
    bundled = {each.split("node_modules/")[1].split("/")[0] for each in sources if "node_modules/" in each}
    licenses = (VENDOR / "LICENSES.txt").read_text()
    for name in ("markdown-it", *sorted(bundled)):
        package = json.loads((packages / name / "package.json").read_text())
        (text,) = (packages / name).glob("LICENSE*")
        assert f"{name} {package['version']} ({package['license']})" in licenses
        assert text.read_text().strip() in licenses


@pytest.mark.parametrize("word", ["innerHTML", "eval(", "new Function"])
def test_the_library_turns_no_text_into_code(word: str) -> None:
    files = [*FOLDER.glob("*.js"), VENDOR / LIBRARY]
    assert [path.name for path in files if word in path.read_text()] == []

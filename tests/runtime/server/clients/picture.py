"""Takes the screenshots of the page in `docs/page/`, with SmolLM2 in pods that it starts.

`python tests/runtime/server/clients/picture.py docs/page`, after `make model clients`.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "cluster"))

import httpx
from client_support import chromium
from client_support.page_actions import CAPITAL, answered, answers, ask, make_model_say
from cluster_support.cache import cache_folder
from playwright.sync_api import Browser, Page, expect, sync_playwright

HOST = "127.77.0.1"
TOKEN = "control-token-of-the-pictures"
KEY = "key-of-the-pictures"
WAIT_MS = 120_000
WIDE, NARROW = {"width": 1200, "height": 780}, {"width": 390, "height": 780}
EVEN = "Write a Python function that tells whether a number is even."
STORY = "Tell me a long story about a lighthouse."
IS_UNDER_WAY = "() => document.querySelector('.turn:last-child .content')?.innerText.length > 200"
MARKDOWN = """## Even numbers

A number is *even* if **two** divides it without a remainder:

1. Take the remainder with `%`.
2. Compare it with zero.

| number | remainder | even |
|-------:|----------:|------|
| 7 | 1 | no |
| 12 | 0 | yes |

```python
def is_even(number):
    return number % 2 == 0
```

> Zero is even, too: see [Wikipedia](https://en.wikipedia.org/wiki/Parity_of_zero)."""


@contextlib.contextmanager
def pod(*flags: str, **environment: str) -> Iterator[None]:
    """A launcher at HOST, which is ready."""
    model = cache_folder(os.environ) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    command = [sys.executable, "-m", "megatron_runtime.cli", "--model", str(model), "--served-name", "smollm2"]
    identity = {"MEGATRON_BIND_HOST": HOST, "MEGATRON_CONTROL_TOKEN": TOKEN}
    process = subprocess.Popen([*command, *flags], env={**os.environ, **identity, **environment})
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{HOST}:8000/ready", trust_env=False).is_success:
                    break
            assert process.poll() is None, "the launcher has ended"
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def send_signal(name: str) -> None:
    """Sends a lifecycle signal to the engines."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:
        client.post(f"http://{HOST}:9000/v1/{name}", params={"wait": "true", "timeout": 30}).raise_for_status()


class Pictures:
    """Takes pictures in new browser contexts."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser = browser
        self._folder = folder

    def open(self, size: dict[str, int], scheme: str = "light") -> Page:
        """A new page with an empty conversation."""
        page = self._browser.new_page(viewport=size, color_scheme=scheme)
        page.set_default_timeout(WAIT_MS)
        page.goto(f"http://{HOST}:8000")
        return page

    def take(self, page: Page, name: str) -> None:
        """Writes the picture, and closes the page."""
        page.evaluate("document.fonts.ready")
        page.screenshot(path=self._folder / f"{name}.png", animations="disabled")
        page.close()

    def markdown(self, name: str, size: dict[str, int], scheme: str) -> None:
        """An answer with all that Markdown has."""
        page = self.open(size, scheme)
        make_model_say(page, MARKDOWN)
        ask(page, "When is a number even?")
        answered(page)
        self.take(page, name)

    def chat(self) -> None:
        """A conversation with an answer in progress."""
        page = self.open(WIDE)
        page.get_by_label("Temperature").fill("0")
        for count, question in enumerate((EVEN, CAPITAL), start=1):
            ask(page, question)
            answered(page, count)
        ask(page, STORY)
        page.wait_for_function(IS_UNDER_WAY)
        self.take(page, "chat")

    def service(self) -> None:
        """The panel on a narrow screen."""
        page = self.open(NARROW)
        page.get_by_role("button", name="Service").click()
        expect(page.locator(".replica-groups li")).to_have_count(2)
        self.take(page, "service-narrow")

    def paused(self) -> None:
        """A question to a paused model."""
        page = self.open(NARROW)
        page.get_by_label("Temperature").evaluate("field => { field.value = 0 }")
        send_signal("pause")
        ask(page, CAPITAL)
        expect(answers(page).locator(".note")).to_have_text("waits: the model is paused")
        self.take(page, "paused-narrow")
        send_signal("unpause")

    def edited(self) -> None:
        """A message in its editor, after a retry."""
        page = self.open(WIDE)
        make_model_say(page, "The capital of France is Paris.")
        for count, question in enumerate((CAPITAL, "And of Italy?"), start=1):
            ask(page, question)
            answered(page, count)
        page.get_by_role("button", name="Retry this answer").last.click()
        answered(page, 2)
        page.get_by_role("button", name="Edit this message").last.click()
        self.take(page, "edit")

    def full_context(self) -> None:
        """A conversation that is longer than the context."""
        page = self.open(WIDE)
        make_model_say(page, "The lighthouse stood on a rock, and its keeper lit the lamp every evening. " * 4)
        for count in range(1, 5):
            ask(page, STORY)
            answered(page, count)
        page.locator(".divider").scroll_into_view_if_needed()
        self.take(page, "full-context")

    def key(self) -> None:
        """A server that requires a key."""
        page = self.open(WIDE)
        page.get_by_label("Key", exact=True).fill("a wrong key")
        page.get_by_role("button", name="Apply").click()
        expect(page.get_by_text("The server rejected this API key.")).to_be_visible()
        self.take(page, "api-key")


def main(folder: Path) -> None:
    """Takes all pictures."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as secrets:
        program = chromium.find(os.environ)
        pictures = Pictures(playwright.chromium.launch(executable_path=program, args=list(chromium.FLAGS)), folder)
        with pod("--replica-groups", "2", "--kv-cache-memory", "256Mi"):
            pictures.chat()
            pictures.markdown("markdown-dark", WIDE, "dark")
            pictures.markdown("markdown-narrow", NARROW, "light")
            pictures.service()
            pictures.paused()
            pictures.edited()
        keys = Path(secrets) / "keys"
        keys.write_text(f"{KEY}\n")
        with pod("--max-sequence-length", "320", "--kv-cache-memory", "256Mi"):
            pictures.full_context()
        with pod("--kv-cache-memory", "256Mi", MEGATRON_API_KEYS_FILE=str(keys)):
            pictures.key()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Takes the screenshot of the page for the README.

Run `make serve` in one shell, and in another
`python tests/runtime/server/clients/picture.py http://127.0.0.1:8000 docs/page.png`.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "cluster"))

from client_support import chromium
from playwright.sync_api import Page, sync_playwright

QUESTIONS = ("Write a Python function that tells whether a number is even.", "What is the capital of France?")
STORY = "Tell me a long story about a lighthouse."
IS_UNDER_WAY = "() => document.querySelector('.turn:last-child .words')?.innerText.length > 200"


def ask(page: Page, words: str) -> None:
    page.get_by_label("Your message").fill(words)
    page.keyboard.press("Enter")


def main(url: str, picture: str) -> None:
    with sync_playwright() as playwright:
        program = chromium.find(os.environ)
        browser = playwright.chromium.launch(executable_path=program, args=list(chromium.FLAGS))
        page = browser.new_page(viewport={"width": 1200, "height": 780})
        page.goto(url)
        page.get_by_label("Temperature").fill("0")
        for question in QUESTIONS:
            ask(page, question)
            page.get_by_role("button", name="Send").wait_for(timeout=120_000)
        ask(page, STORY)
        page.wait_for_function(IS_UNDER_WAY)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

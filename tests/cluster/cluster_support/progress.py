"""Progress messages."""

import functools
import time
from collections.abc import Callable

Say = Callable[[str], None]
say_at_once: Say = functools.partial(print, flush=True)


class Progress:
    """Prints each step with the seconds since the first."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._started = time.monotonic()

    def __call__(self, step: str) -> None:
        self._say(f"[{self.seconds():4.0f} s] {step}")

    def seconds(self) -> float:
        return time.monotonic() - self._started

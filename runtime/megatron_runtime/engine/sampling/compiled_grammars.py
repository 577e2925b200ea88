"""Grammars that are compiled for the requests of an engine, and kept for later ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_runtime.config import InferenceConfig
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.processes.allocator import return_freed_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

BYTES_PER_CHARACTER = 700
"""Memory of a compiled grammar by the length of its text. llguidance does not report it; measured after its use, which
adds states: 30 to 150 bytes for most schemas and for choices, 350 for a regular expression of Unicode classes, 640 for
a schema of 900 properties without types."""
SMALL_SHARE = 64
"""A grammar that takes at most this part of the memory does not wait for room: with 96 MiB, one of 2,246 characters."""
IDLE_SECONDS = 60.0
MOST_IDLE = 32
"""Grammars that are kept without a request that waits for them: their answers may have added states, up to 40 MiB."""


@dataclass(slots=True, eq=False)
class _Grammar:
    text: str
    compiled: Future[LLMatcher] = field(default_factory=Future)
    users: int = 0
    used: float = 0.0
    """When it was needed last, on the monotonic clock."""

    @property
    def size(self) -> int:
        return BYTES_PER_CHARACTER * len(self.text)

    @property
    def is_idle(self) -> bool:
        return not self.users and self.compiled.done()

    def has_result(self, matcher: LLMatcher) -> bool:
        return self.compiled.done() and not self.compiled.exception() and self.compiled.result() is matcher


class CompiledGrammars:
    """Compiles grammars and keeps the last ones: a large one takes a tenth of a second, its copy microseconds, and
    the choices of a request, and often all requests of an application, have the same.

    One thread compiles, without Python's lock: the engine's steps continue. A grammar is kept from `compile` to
    `release`, and one for which those leave no room is compiled when they do; so no step compiles a grammar again.
    Matchers share the memory of their grammar, whether it is kept or not. The methods may be called from any thread.

    Args:
        tokenizer: The model's.
        idle_seconds: Time for which a grammar is kept after its last use; then its memory returns to the system.

    Attributes:
        max_bytes: Most memory of the grammars, by BYTES_PER_CHARACTER. One may have more if it is alone, or alone with
            small ones.
    """

    def __init__(self, tokenizer: Tokenizer, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._tokenizer = tokenizer
        self.max_bytes = InferenceConfig.grammar_cache_bytes
        self._idle_seconds = idle_seconds
        self._timer: threading.Timer | None = None
        self._known: OrderedDict[str, _Grammar] = OrderedDict()
        """By text, the one whose last use is the longest ago first."""
        self._queue: dict[str, _Grammar] = {}
        """Those of them whose compilation has not begun, because they wait for room."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Compile a grammar in the thread, and keep it until `release` is called as often as this method. The result of
        an unsupported one has an error, see `check`."""
        with self._lock:
            found = self._find(grammar)
            if found is None:
                found = self._queue[grammar] = self._add(grammar, users=1)
                self._begin_queued()
            else:
                found.users += 1
            return found.compiled

    def release(self, grammar: str) -> None:
        """A grammar of `compile` has a matcher, or needs none. Others that wait for its room may begin."""
        with self._lock:
            found = self._find(grammar)
            assert found is not None, "it is kept"
            found.users -= 1
            if not found.users:
                if self._queue.pop(grammar, None) is not None:
                    del self._known[grammar]
                self._begin_queued()

    def check(self, grammar: str) -> None:
        """Raises InvalidRequestError with llguidance's message for an unsupported grammar."""
        matcher = self.start(grammar)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar is not supported: {matcher.get_error()}", field="grammar")

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar."""
        return self.start(grammar).deep_copy()

    def start(self, grammar: str, *, exhausted: LLMatcher | None = None) -> LLMatcher:
        """The start of the grammar, to be copied only; compiled by the caller if that has not begun, because other
        grammars may wait for the thread.

        Its copies share the states of the lexer, and their limit. ``exhausted`` is a start whose copies have reached
        it: the grammar is compiled again, unless another request has done so.
        """
        with self._lock:
            found = self._find(grammar)
            is_own = found is None or self._queue.pop(grammar, None) is not None
            found = found or self._add(grammar)
            if exhausted is not None and not is_own and found.has_result(exhausted):
                found.compiled = Future()
                is_own = True
        if is_own:
            self._compile(found)
            with self._lock:
                self._drop_beyond_limit(found)
        return found.compiled.result()

    @property
    def num_bytes(self) -> int:
        """Memory of the compiled grammars, by BYTES_PER_CHARACTER."""
        return sum(each.size for each in self._known.values() if each.text not in self._queue)

    def _find(self, grammar: str) -> _Grammar | None:
        found = self._known.get(grammar)
        if found is not None:
            found.used = time.monotonic()
            self._known.move_to_end(grammar)
        return found

    def _add(self, grammar: str, users: int = 0) -> _Grammar:
        self._known[grammar] = added = _Grammar(grammar, users=users, used=time.monotonic())
        self._watch()
        return added

    def _begin_queued(self) -> None:
        """Compile those in the queue that have room; small ones do not wait for the others."""
        is_blocked = False
        for grammar in list(self._queue.values()):
            is_small = self._is_small(grammar)
            if not is_small and (is_blocked or not self._has_room(grammar)):
                is_blocked = True
                continue
            del self._queue[grammar.text]
            self._drop_beyond_limit(grammar)
            self._thread.submit(self._compile, grammar)

    def _is_small(self, grammar: _Grammar) -> bool:
        return grammar.size * SMALL_SHARE <= self.max_bytes

    def _has_room(self, grammar: _Grammar) -> bool:
        used = [each for each in self._known.values() if each.users and each.text not in self._queue]
        is_alone = all(self._is_small(each) for each in used)
        return is_alone or grammar.size + sum(each.size for each in used) <= self.max_bytes

    def _drop_beyond_limit(self, newest: _Grammar) -> None:
        excess = self.num_bytes - self.max_bytes
        idle = [each for each in self._known.values() if each.is_idle and each is not newest]
        for index, grammar in enumerate(idle):
            if excess <= 0 and len(idle) - index <= MOST_IDLE:
                break
            excess -= grammar.size
            del self._known[grammar.text]

    def _watch(self) -> None:
        if self._known and self._timer is None:
            self._timer = threading.Timer(self._idle_seconds, self._drop_idle)
            self._timer.daemon = True
            self._timer.start()

    def _drop_idle(self) -> None:
        with self._lock:
            self._timer = None
            limit = time.monotonic() - self._idle_seconds
            for grammar in [each for each in self._known.values() if each.is_idle and each.used <= limit]:
                del self._known[grammar.text]
            self._watch()
        return_freed_memory()

    def _compile(self, grammar: _Grammar) -> None:
        try:
            grammar.compiled.set_result(_new_matcher(self._vocabulary, grammar.text))
        except BaseException as error:
            grammar.compiled.set_exception(error)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer  # Imported here, because most services never use a grammar.

        return LLTokenizer(self._tokenizer.definition, eos_token=sorted(self._tokenizer.eos_token_ids))


def compiled_grammars(tokenizer: Tokenizer) -> CompiledGrammars:
    """Those of the tokenizer."""
    return tokenizer.kept("compiled grammars", lambda: CompiledGrammars(tokenizer))


def _new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    from megatron_runtime.guides import LIMITS

    return LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)

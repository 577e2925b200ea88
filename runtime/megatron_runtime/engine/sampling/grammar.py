"""The tokens that the grammar of a request allows next."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.config import InferenceConfig
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.processes.allocator import return_freed_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class RequestGuide:
    """Follows the answer of one request through its grammar.

    The allowed tokens depend on the tokens of the answer only, so a request can continue on another engine.

    Args:
        grammar: A grammar that ``guides.check_grammar`` accepts.
        tokenizer: The model's. llguidance's representation of it is cached in it.
        prompt_length: Number of tokens of the sequence that are the prompt.
    """

    def __init__(self, grammar: str, tokenizer: Tokenizer, prompt_length: int) -> None:
        self._grammars = compiled_grammars(tokenizer)
        self._grammar = grammar
        self._first = self._known = prompt_length
        self._drafts: list[int] = []
        """The last of the known tokens, if they were drafts."""
        self._followed_drafts = False
        """Whether the last call of `after` had drafts, so that a failure may be due to them."""
        self.mask_milliseconds = 0
        """Time of the last call of `after`, rounded down."""
        self._matcher = self._grammars.matcher(grammar)

    @property
    def failure(self) -> str | None:
        """Why the grammar allows no next token although it is not complete; None if it allows one."""
        if not self._matcher.is_error():
            return None
        # The other lines are the whole state of the matcher.
        return (self._matcher.get_error().splitlines() or ["llguidance reported no reason"])[0]

    def after(self, tokens: Sequence[int], length: int, vocab_size: int, *, num_drafts: int = 0) -> NDArray[np.bool_]:
        """The tokens that may follow the first ``length`` tokens: bool [vocab_size]; none after a failure.

        The last ``num_drafts`` of these tokens are drafts. None may follow if the grammar does not allow a draft.
        """
        started = time.perf_counter()
        if self._followed_drafts and self._matcher.is_error():
            self._start_over()
            self._repeat(tokens, length - num_drafts)
        self._followed_drafts = num_drafts > 0
        self._forget_wrong_drafts(tokens, length)
        if length < self._known:
            self._start_over()  # The pass failed, and is repeated.
        is_possible = self._consume(list(tokens[self._known : length]), num_drafts)
        allowed = np.zeros(vocab_size, np.bool_)
        if is_possible and self.failure is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_)
            allowed[: len(found)] = found
        self.mask_milliseconds = int(1e3 * (time.perf_counter() - started))
        return allowed

    def _consume(self, tokens: list[int], num_drafts: int) -> bool:
        """False if the grammar does not allow a draft."""
        if self._matcher.is_stopped():
            return True
        if not num_drafts:
            self._matcher.consume_tokens(tokens)
            self._known += len(tokens)
            self._drafts = []
            return True
        consumed = self._matcher.try_consume_tokens(tokens)
        self._known += consumed
        self._drafts += tokens[max(len(tokens) - num_drafts, 0) : consumed]
        return consumed == len(tokens)

    def _forget_wrong_drafts(self, tokens: Sequence[int], length: int) -> None:
        sure = self._known - len(self._drafts)
        right = 0
        while right < len(self._drafts) and sure + right < length and tokens[sure + right] == self._drafts[right]:
            right += 1
        if right < len(self._drafts):
            if self._matcher.is_error() or not self._matcher.rollback(len(self._drafts) - right):
                self._start_over()
                return
            self._known = sure + right
            del self._drafts[right:]

    def _repeat(self, tokens: Sequence[int], length: int) -> None:
        """Consume the first tokens, with a mask before the last one as without drafts: whether llguidance reaches its
        limits depends on that."""
        for end in (length - 1, length):
            self._consume(list(tokens[self._known : end]), 0)
            if not self._matcher.is_error():
                self._matcher.compute_bitmask()

    def _start_over(self) -> None:
        self._matcher = self._grammars.matcher(self._grammar)
        self._known = self._first
        self._drafts = []


BYTES_PER_CHARACTER = 700
"""Memory of a compiled grammar by the length of its text. llguidance does not report it; measured after its use, which
adds states: 30 to 150 bytes for most schemas and for choices, 350 for a regular expression of Unicode classes, 640 for
a schema of 900 properties without types."""
IDLE_SECONDS = 60.0


@dataclass(slots=True)
class _Kept:
    grammar: Future[LLMatcher]
    size: int
    used: float = 0.0


class CompiledGrammars:
    """Compiles grammars and keeps the last ones: a large one takes a tenth of a second, its copy microseconds, and
    the choices of a request, and often all requests of an application, have the same.

    One thread compiles, without Python's lock: the engine's steps continue. The methods may be called from any thread.

    Args:
        tokenizer: The model's.
        idle_seconds: Time for which a grammar is kept after its last use; then its memory returns to the system.

    Attributes:
        max_bytes: Most memory of the kept grammars, by BYTES_PER_CHARACTER. The last one is kept whatever its size.
    """

    def __init__(self, tokenizer: Tokenizer, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._tokenizer = tokenizer
        self.max_bytes = InferenceConfig.grammar_cache_bytes
        self._idle_seconds = idle_seconds
        self._timer: threading.Timer | None = None
        self._bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Compile a grammar in the thread. The result of an unsupported one has an error, see `check`."""
        with self._lock:
            kept = self._find(grammar)
            return self._keep(grammar, self._thread.submit(self._make, grammar)) if kept is None else kept

    def check(self, grammar: str) -> None:
        """Raises InvalidRequestError with llguidance's message for an unsupported grammar."""
        matcher = self._compiled(grammar)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar is not supported: {matcher.get_error()}", field="grammar")

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar."""
        return self._compiled(grammar).deep_copy()

    def _compiled(self, grammar: str) -> LLMatcher:
        """The grammar; compiled by the caller if it is not kept, because other grammars may wait for the thread."""
        with self._lock:
            kept = self._find(grammar)
        if kept is None:
            kept = Future()
            kept.set_result(self._make(grammar))
            with self._lock:
                self._keep(grammar, kept)
        return kept.result()

    @property
    def num_bytes(self) -> int:
        """Memory of the kept grammars, by BYTES_PER_CHARACTER."""
        return self._bytes

    def _find(self, grammar: str) -> Future[LLMatcher] | None:
        kept = self._kept.get(grammar)
        if kept is None:
            return None
        kept.used = time.monotonic()
        self._kept.move_to_end(grammar)
        return kept.grammar

    def _keep(self, grammar: str, matcher: Future[LLMatcher]) -> Future[LLMatcher]:
        self._drop(grammar)
        self._kept[grammar] = _Kept(matcher, BYTES_PER_CHARACTER * len(grammar), time.monotonic())
        self._bytes += self._kept[grammar].size
        for text in [text for text, each in self._kept.items() if each.grammar.done() and text != grammar]:
            if self._bytes <= self.max_bytes:
                break
            self._drop(text)
        self._watch()
        return matcher

    def _drop(self, grammar: str) -> None:
        if (kept := self._kept.pop(grammar, None)) is not None:
            self._bytes -= kept.size

    def _watch(self) -> None:
        if self._kept and self._timer is None:
            self._timer = threading.Timer(self._idle_seconds, self._drop_idle)
            self._timer.daemon = True
            self._timer.start()

    def _drop_idle(self) -> None:
        with self._lock:
            self._timer = None
            limit = time.monotonic() - self._idle_seconds
            for text in [text for text, each in self._kept.items() if each.grammar.done() and each.used <= limit]:
                self._drop(text)
            self._watch()
        return_freed_memory()

    def _make(self, grammar: str) -> LLMatcher:
        return _new_matcher(self._vocabulary, grammar)

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

    return LLMatcher(vocabulary, grammar, limits=LIMITS)

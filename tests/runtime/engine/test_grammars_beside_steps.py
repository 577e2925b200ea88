"""A new grammar is compiled beside the steps, and slow masks take turns: other requests do not wait for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling import compiled_grammars as grammars_module
from megatron_runtime.engine.sampling.compiled_grammars import BYTES_PER_CHARACTER, SMALL_SHARE, compiled_grammars
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.worker.inbox import PIECE_REQUESTS
from megatron_runtime.engine.worker.loop_requests import AssignedBody, LoopRequest, LoopRequests
from megatron_runtime.guides import regex_grammar
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import unpack_body
from megatron_runtime.wire.items import Assignment

SECONDS = 30
MANY = 20
GUIDED, FREE = b"g" * 16, b"f" * 16


class SlowCompiler:
    """Compiles when the test allows it, and notes what it has compiled."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()
        self.compiled: list[str] = []
        self._new_matcher = grammars_module._new_matcher

    def __call__(self, vocabulary: Any, grammar: str) -> Any:
        assert self.may_compile.wait(SECONDS)
        self.compiled.append(grammar)
        return self._new_matcher(vocabulary, grammar)


class Served:
    """The requests of an engine that a test steps."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._compiled = threading.Semaphore(0)
        self.requests = LoopRequests(engine, on_compiled=self._compiled.release)
        self.results: dict[bytes, dict[str, Any]] = {}

    def add(self, uuid: bytes, *, streams: bool = False, **fields: Any) -> None:
        params = SamplingParams(num_tokens_to_generate=8, **fields)
        self.requests.add(Assignment(uuid, 0, streams, 0), AssignedBody(RequestBody("Hello", params.serialize())))

    def begin_compiled(self) -> list[LoopRequest]:
        return self.requests.begin_compiled(PIECE_REQUESTS)

    def step_to_end(self) -> None:
        while self._engine.has_unfinished_requests():
            for record in self._engine.step_modern()["finished_request_records"]:
                served = self.requests.finish(record)
                if served is not None and served.reply is not None:
                    self.results[served.uuid] = unpack_body(served.reply)

    def step_to_report(self) -> None:
        """Until a request has reported tokens."""
        while not (partials := self._engine.step_modern()["partial_outputs"]):
            pass
        for local_id, partial in partials.items():
            self.requests.progress(local_id, partial)

    def wait_compiled(self, grammars: int = 1) -> None:
        for _ in range(grammars):
            assert self._compiled.acquire(timeout=SECONDS)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    slow = SlowCompiler()
    monkeypatch.setattr(grammars_module, "_new_matcher", slow)
    yield slow
    slow.may_compile.set()


@pytest.fixture
def served(
    make_engine: Callable[..., DynamicInferenceEngine],
    compiler: SlowCompiler,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> Served:
    engine = make_engine()
    monkeypatch.setattr(engine.tokenizer, "_kept", {})
    return Served(engine)


def test_other_requests_end_while_a_grammar_is_compiled(served: Served, compiler: SlowCompiler) -> None:
    served.add(GUIDED, grammar=regex_grammar("[ab]{5}"))
    served.add(FREE, ignore_eos=True)
    assert not served.begin_compiled()
    served.step_to_end()
    assert set(served.results) == {FREE}
    assert served.requests.uuids == [GUIDED, FREE]
    compiler.may_compile.set()
    served.wait_compiled()
    assert not served.begin_compiled()
    served.step_to_end()
    text = served.results[GUIDED]["generated_text"]
    assert len(text) == 5
    assert set(text) <= set("ab")


def test_a_request_whose_grammar_is_compiled_can_be_aborted(served: Served, compiler: SlowCompiler) -> None:
    served.add(GUIDED, grammar=regex_grammar("[ab]{5}"))
    served.requests.abort(GUIDED)
    compiler.may_compile.set()
    served.wait_compiled()
    assert not served.begin_compiled()
    served.step_to_end()
    assert served.results[GUIDED]["finish_reason"] == "abort"


def test_a_request_that_is_released_before_its_grammar_is_compiled_does_not_begin(
    served: Served, compiler: SlowCompiler
) -> None:
    served.add(GUIDED, grammar=regex_grammar("[ab]{5}"))
    served.requests.release(GUIDED)
    compiler.may_compile.set()
    served.wait_compiled()
    assert not served.begin_compiled()
    assert not served.requests.has_compiled
    served.step_to_end()
    assert not served.results


def test_a_broken_grammar_ends_its_request_alone(served: Served, compiler: SlowCompiler) -> None:
    served.add(GUIDED, grammar="start: missing")
    served.add(FREE, ignore_eos=True)
    compiler.may_compile.set()
    served.wait_compiled()
    assert not served.begin_compiled()
    served.step_to_end()
    assert served.results[GUIDED]["finish_reason"] == "error"
    assert served.results[FREE]["finish_reason"] == "length"


def test_a_request_that_waits_for_its_grammar_can_be_aborted(served: Served) -> None:
    served.add(GUIDED, grammar=regex_grammar("[ab]{5}"))
    served.requests.abort(GUIDED)
    served.wait_compiled()
    assert not served.begin_compiled()
    served.step_to_end()
    assert served.results[GUIDED]["finish_reason"] == "abort"
    assert not served.requests.compiling


@pytest.fixture
def room_for_one(served: Served, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Served:
    """There is room for one grammar at a time."""
    monkeypatch.setattr(compiled_grammars(byte_tokenizer), "max_bytes", BYTES_PER_CHARACTER)
    return served


def test_a_grammar_is_compiled_once_although_more_wait_than_have_room(
    room_for_one: Served, compiler: SlowCompiler
) -> None:
    grammars = [regex_grammar(f"[ab]{{{length}}}") for length in range(1, MANY + 1)]
    for place, grammar in enumerate(grammars):
        room_for_one.add(bytes([place]) * 16, grammar=grammar)
    compiler.may_compile.set()
    for _ in grammars:
        room_for_one.wait_compiled()
        assert not room_for_one.begin_compiled()
        room_for_one.step_to_end()
    assert sorted(len(result["generated_text"]) for result in room_for_one.results.values())[:3] == [1, 2, 3]
    assert len(room_for_one.results) == len(grammars)
    assert compiler.compiled == grammars


def test_a_grammar_is_kept_until_its_request_has_begun(room_for_one: Served, compiler: SlowCompiler) -> None:
    first, second = regex_grammar("[ab]{5}"), regex_grammar("[cd]{5}")
    room_for_one.add(GUIDED, grammar=first)
    compiler.may_compile.set()
    room_for_one.wait_compiled()
    room_for_one.add(FREE, grammar=second)
    room_for_one.begin_compiled()
    room_for_one.step_to_end()
    room_for_one.wait_compiled()
    assert compiler.compiled == [first, second]
    room_for_one.begin_compiled()
    room_for_one.step_to_end()
    assert len(room_for_one.results) == 2
    assert compiler.compiled == [first, second]


def test_a_request_that_has_begun_leaves_the_room_of_its_grammar_to_others(
    room_for_one: Served, compiler: SlowCompiler
) -> None:
    first, second = regex_grammar("[ab]{8}"), regex_grammar("[cd]{8}")
    room_for_one.add(GUIDED, streams=True, grammar=first)
    room_for_one.add(FREE, grammar=second)
    compiler.may_compile.set()
    room_for_one.wait_compiled()
    room_for_one.begin_compiled()
    room_for_one.step_to_report()
    room_for_one.wait_compiled()
    assert compiler.compiled == [first, second]
    assert not room_for_one.results
    room_for_one.begin_compiled()
    room_for_one.step_to_end()
    assert len(room_for_one.results) == 2


@pytest.mark.parametrize("how", [LoopRequests.release, LoopRequests.abort])
def test_a_request_that_ends_before_its_grammar_has_room_does_not_delay_the_next_one(
    room_for_one: Served, compiler: SlowCompiler, how: Callable[[LoopRequests, bytes], None]
) -> None:
    first, second, third = (regex_grammar(f"{letter}{{5}}") for letter in "abc")
    room_for_one.add(b"1" * 16, grammar=first)
    compiler.may_compile.set()
    room_for_one.wait_compiled()
    room_for_one.add(b"2" * 16, grammar=second)
    room_for_one.add(b"3" * 16, grammar=third)
    how(room_for_one.requests, b"2" * 16)
    room_for_one.begin_compiled()
    room_for_one.step_to_end()
    while b"3" * 16 not in room_for_one.results:
        room_for_one.wait_compiled()
        room_for_one.begin_compiled()
        room_for_one.step_to_end()
    assert compiler.compiled == [first, third]


def test_a_small_grammar_does_not_wait_for_the_room_of_a_large_one(
    served: Served, compiler: SlowCompiler, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = regex_grammar("c{5}")
    monkeypatch.setattr(compiled_grammars(byte_tokenizer), "max_bytes", SMALL_SHARE * BYTES_PER_CHARACTER * len(small))
    large = [regex_grammar(letter * SMALL_SHARE * len(small)) for letter in "ab"]
    for place, grammar in enumerate([*large, small]):
        served.add(bytes([place]) * 16, grammar=grammar)
    compiler.may_compile.set()
    served.wait_compiled(2)
    assert compiler.compiled == [large[0], small]
    served.begin_compiled()
    served.step_to_end()
    served.wait_compiled()
    assert compiler.compiled == [large[0], small, large[1]]


def test_slow_masks_of_many_requests_do_not_delay_the_others(
    make_engine: Callable[..., DynamicInferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestGuide, "mask_milliseconds", property(lambda _: 4, lambda _, __: None), raising=False)
    guided = SamplingParams(num_tokens_to_generate=24, temperature=1.0, seed=9, grammar=regex_grammar("[ab]{20}"))
    free = SamplingParams(num_tokens_to_generate=24, temperature=1.0, seed=9, ignore_eos=True)
    requests = [guided, free, guided, guided, guided]
    alone = [make_engine().generate(["Hello"], params)[0].merge().generated_tokens for params in requests]
    engine = make_engine()
    for request_id, params in enumerate(requests):
        engine.add_request(request_id, "Hello", params)
    found: dict[int, list[int]] = {}
    waited: Counter[int] = Counter()
    while engine.has_unfinished_requests():
        running = engine.scheduler.running_ids
        known = {each: len(engine.get_request(each).generated_tokens) for each in running}
        for record in engine.step_modern()["finished_request_records"]:
            found[record.request_id] = record.merge().generated_tokens
        for each in set(running) - set(found):
            waited[each] += len(engine.get_request(each).generated_tokens) == known[each]
    assert [found[each] for each in range(5)] == alone
    assert waited[0] == waited[1] == 0
    assert all(waited[each] > 10 for each in (2, 3, 4))

"""Passes that begin before the tokens of the last one are known, on the pretended device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gpu_support.early_passes import PENALTIES, add, captured_engine, finish, next_pass, on_cpu
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.small_engine import LOWER_CASE, random_decoder, small_engine
from runtime_support.memory_shortages import ALLOCATOR, CUDA, Shortage

pytestmark = pytest.mark.usefixtures("device_guard")


def test_a_step_waits_once_for_tokens_while_the_next_pass_runs(device: PretendedDevice) -> None:
    engine = captured_engine()
    futures = [add(engine, number, 9) for number in range(3)]
    for _ in range(3):
        engine.step_modern()
    assert next_pass(engine).has_begun
    for _ in range(4):
        device.work = Work()
        engine.step_modern()
        assert (device.work.replays, device.work.launches, device.work.pinned_copies) == (2, 2, 1)
        assert sum(device.work.waits.values()) == 1
        assert device.arriving, "the tokens of the next pass are on their way"
    assert finish(engine, futures) == on_cpu(dict.fromkeys(range(3), 9))


def test_no_pass_begins_early_with_legacy_scheduling(device: PretendedDevice) -> None:
    """Each step has one pass, on graphs all the same."""
    engine = captured_engine(async_sched_mode="legacy")
    futures = [add(engine, number, 9) for number in range(3)]
    engine.step_modern()
    for _ in range(4):
        device.work = Work()
        engine.step_modern()
        assert not next_pass(engine).has_begun
        assert (device.work.replays, device.arriving) == (2, [])
    assert finish(engine, futures) == on_cpu(dict.fromkeys(range(3), 9))


def test_requests_that_end_leave_the_others_their_rows(device: PretendedDevice) -> None:
    """The pass that begins has rows of requests whose stop token ends them; that of a last token is known before."""
    lengths = {0: 4, 1: 30, 2: 9, 3: 30}
    whole = on_cpu(lengths)
    stop = {"stop_token_ids": [whole[1][5]]}
    expected = on_cpu(lengths, **stop)
    assert len(expected[1]) < 7
    engine = captured_engine()
    futures = [add(engine, number, length, **stop) for number, length in lengths.items()]
    device.work = Work()
    assert finish(engine, futures) == expected
    assert device.work.kernels["turn_positions"] == engine.context.step_count, "no pass was begun in vain"


def test_a_request_that_ends_may_be_the_only_one_with_a_parameter(device: PretendedDevice) -> None:
    """The parameters of the others are those of the pass that has begun, where it has an array of zeros for them."""
    engine = captured_engine()
    futures = [add(engine, 0, 20, top_k=5), add(engine, 1, 30)]
    for _ in range(6):
        engine.step_modern()
    engine.abort_request(0)
    device.work = Work()
    engine.step_modern()
    assert device.work.replays == 2, "the next pass has begun, and none in vain"
    assert finish(engine, futures[1:]) == on_cpu({1: 30})


def test_a_new_request_begins_with_the_pass_after_the_one_that_has_begun(device: PretendedDevice) -> None:
    engine = captured_engine()
    futures = [add(engine, number, 20) for number in range(2)]
    for _ in range(3):
        engine.step_modern()
    futures.append(add(engine, 2, 20))
    device.work = Work()
    assert engine.step_modern()["active_request_ids"] == [0, 1]
    assert device.work.replays == 0, "the pass had begun, and the next one has the prompt"
    assert engine.step_modern()["active_request_ids"] == [0, 1, 2]
    assert finish(engine, futures) == on_cpu(dict.fromkeys(range(3), 20))


@pytest.mark.usefixtures("device")
def test_passes_begin_while_requests_wait_that_have_no_room() -> None:
    engine = captured_engine(max_requests=2)
    lengths = {0: 6, 1: 15, 2: 9, 3: 12, 4: 5}
    futures = [add(engine, number, length) for number, length in lengths.items()]
    begun = []
    while engine.scheduler.num_waiting:
        engine.step_modern()
        engine.check_integrity()
        begun.append(next_pass(engine).has_begun)
    assert begun.count(True) > 2 * begun.count(False)
    assert finish(engine, futures) == on_cpu(lengths)


@pytest.mark.usefixtures("device")
def test_a_request_of_a_large_body_makes_room_although_the_next_pass_has_begun() -> None:
    engine = captured_engine(max_requests=2)
    futures = [add(engine, number, 15, body="large", answers=9) for number in range(3)]
    for _ in range(4):
        engine.step_modern()
    assert next_pass(engine).has_begun
    futures.append(add(engine, 3, 4))
    for _ in range(2):
        engine.step_modern()
        engine.check_integrity()
    assert engine.scheduler.running_ids == [3, 0]
    assert finish(engine, futures) == on_cpu({0: 15, 1: 15, 2: 15, 3: 4})


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("shortage", [ALLOCATOR, CUDA], ids=["allocator", "cuda"])
def test_a_pass_that_has_no_memory_to_begin_early_begins_later(
    monkeypatch: pytest.MonkeyPatch, shortage: Shortage
) -> None:
    engine = captured_engine()
    futures = [add(engine, number, 6) for number in range(2)]
    for _ in range(2):
        engine.step_modern()
    with monkeypatch.context() as without_memory:
        without_memory.setattr(engine.scheduler, "reserve_next", shortage.fail)
        engine.step_modern()
        assert not next_pass(engine).has_begun
        # Other ranks would have begun it, and wait for this one in its first sum.
        without_memory.setattr(next_pass(engine), "_is_single", False)
        with pytest.raises(shortage.kind):
            engine.step_modern()
    assert finish(engine, futures) == on_cpu(dict.fromkeys(range(2), 6))


def test_what_changes_the_next_pass_drops_what_has_begun(device: PretendedDevice) -> None:
    lengths = dict.fromkeys(range(4), 24)
    engine = captured_engine(kv_cache_management_mode="recompute")
    futures = [add(engine, number, length) for number, length in lengths.items()]
    for _ in range(3):
        engine.step_modern()
    engine.invalidate_prefix_cache()
    assert not next_pass(engine).has_begun
    engine.step_modern()
    engine.step_modern()
    assert next_pass(engine).has_begun
    engine.suspend()
    assert not next_pass(engine).has_begun
    assert not device.arriving
    engine.resume()
    for _ in range(3):
        engine.step_modern()
    engine.abort_request(1)
    device.work = Work()
    engine.step_modern()
    assert device.work.replays == 2, "the rows of the others are used"
    expected = on_cpu(lengths)
    del futures[1], expected[1]
    assert finish(engine, futures) == expected


def test_new_weights_compute_the_next_token(device: PretendedDevice) -> None:
    found = []
    weights = {name: place.clone() * 0.9 for name, place in random_decoder(num_layers=1).destinations().items()}
    for engine in (small_engine(random_decoder(num_layers=1)), captured_engine()):
        future = add(engine, 0, 12)
        for _ in range(4):
            engine.step_modern()
        engine.update_weights(weights)
        found.append(finish(engine, [future]))
    assert found[0] == found[1]
    assert device.work.replays


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.5, "min_tokens": 12, "ignore_eos": False},
        {"return_log_probs": True, "top_n_logprobs": 2},
        {"grammar": LOWER_CASE, "ignore_eos": False},
        {"logit_bias": {70: 3.0}},
    ],
    ids=["penalties and a minimum", "log probs", "grammar", "bias"],
)
@pytest.mark.usefixtures("device")
def test_no_pass_begins_where_the_host_edits_logits_or_reads_them(params: dict[str, Any]) -> None:
    engine = captured_engine()
    futures = [add(engine, 0, 12), add(engine, 1, 12, **params)]
    while 1 in engine.step_modern()["active_request_ids"]:
        assert not next_pass(engine).has_begun
    expected = small_engine(random_decoder(num_layers=1))
    assert finish(engine, futures) == finish(expected, [add(expected, 0, 12), add(expected, 1, 12, **params)])


@pytest.mark.parametrize("params", [{}, PENALTIES], ids=["alone", "penalties"])
def test_edits_that_depend_on_the_tokens_begin_the_pass_again(params: dict[str, Any], device: PretendedDevice) -> None:
    """Bad words of several tokens exclude their last one only after the others."""
    whole = on_cpu({0: 60}, **params)[0]
    texts = ("".join(map(chr, pair)) for pair in itertools.pairwise(whole))
    words = params | {"bad_words": [next(text for text in texts if text.isascii() and text.isalnum())]}
    expected = on_cpu({0: 60}, **words)
    assert expected[0] != whole
    engine = captured_engine()
    future = add(engine, 0, 60, **words)
    device.work = Work()
    assert finish(engine, [future]) == expected
    assert device.work.kernels["turn_positions"] > engine.context.step_count, "a pass was begun in vain"


@pytest.mark.usefixtures("device")
def test_no_pass_begins_without_blocks_for_it() -> None:
    engine = captured_engine(kv_cache_memory_bytes=16 << 10)
    futures = [add(engine, number, 40) for number in range(4)]
    begun = []
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
        begun.append(next_pass(engine).has_begun)
    assert engine.stats().evictions_total > 0
    assert set(begun) == {False, True}
    found = [future.result(timeout=0).merge().generated_tokens for future in futures]
    assert found == on_cpu(dict.fromkeys(range(4), 40))


@pytest.mark.parametrize(("seed", "params"), [(0, {}), (1, {}), (2, {}), (3, PENALTIES), (4, PENALTIES)])
@pytest.mark.usefixtures("device")
def test_random_arrivals_and_ends_give_the_tokens_of_the_cpu(seed: int, params: dict[str, float]) -> None:
    chance = np.random.default_rng(seed)
    lengths = {number: int(chance.integers(1, 25)) for number in range(9)}
    params = params | {"stop_token_ids": [66, 90]}
    expected = on_cpu(lengths, **params)
    engine = captured_engine(
        enable_prefix_caching=bool(seed), **({"kv_cache_memory_bytes": 16 << 10} if seed > 3 else {})
    )
    futures, waiting = {}, list(lengths)
    while waiting or engine.has_unfinished_requests():
        if waiting and chance.random() < 0.3:
            number = waiting.pop(0)
            futures[number] = add(engine, number, lengths[number], **params)
        engine.step_modern()
        engine.check_integrity()
    assert [futures[number].result(timeout=0).merge().generated_tokens for number in lengths] == expected

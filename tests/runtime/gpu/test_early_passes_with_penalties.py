"""Passes with penalties that begin before the tokens of the last one are known, on the pretended device."""

from __future__ import annotations

import pytest
from gpu_support.early_passes import PENALTIES, add, captured_engine, finish, next_pass, on_cpu
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.small_engine import random_decoder, small_engine

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine

pytestmark = pytest.mark.usefixtures("device_guard")


@pytest.mark.parametrize("penalties", [{"presence_penalty": 0.9}, {"repetition_penalty": 1.3}, PENALTIES])
def test_passes_with_penalties_begin_before_the_host_knows_the_tokens(
    penalties: dict[str, float], device: PretendedDevice
) -> None:
    """With one launch more than others, and the copy of its arguments. The first of them has the lists of tokens."""
    lengths = dict.fromkeys(range(3), 12)
    engine = captured_engine()
    futures = [add(engine, number, length, **penalties) for number, length in lengths.items()]
    for _ in range(3):
        engine.step_modern()
    for _ in range(4):
        assert next_pass(engine).has_begun
        device.work = Work()
        engine.step_modern()
        assert (device.work.replays, device.work.launches, device.work.pinned_copies) == (2, 3, 2)
        assert sum(device.work.waits.values()) == 1
        assert +device.work.copies == {}
    found = finish(engine, futures)
    assert found == on_cpu(lengths, **penalties)
    assert found != on_cpu(lengths)


def test_requests_with_and_without_penalties_share_passes_that_begin_early(device: PretendedDevice) -> None:
    params = [PENALTIES, {}, {"frequency_penalty": 2.0, "logit_bias": {70: 3.0}}, {"frequency_penalty": 1.0}]
    lengths = [6, 25, 9, 17]

    def all_of(engine: DynamicInferenceEngine) -> list[list[int]]:
        futures = [add(engine, number, lengths[number], **params[number]) for number in range(4)]
        return finish(engine, futures)

    assert all_of(captured_engine()) == all_of(small_engine(random_decoder(num_layers=1)))
    assert device.work.kernels["penalize_counted"]


@pytest.mark.usefixtures("device")
def test_a_request_whose_tokens_outgrow_the_list_goes_on_with_the_counts_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_runtime.engine.sampling.penalties.CAPACITY", 16)
    monkeypatch.setattr("megatron_runtime.engine.sampling.penalties._ROOM", 4)
    expected = on_cpu({0: 60, 1: 60}, **PENALTIES)
    engine, begun = captured_engine(), []
    futures = [add(engine, number, 60, **PENALTIES) for number in range(2)]
    while engine.has_unfinished_requests():
        engine.step_modern()
        begun.append(next_pass(engine).has_begun)
    assert [future.result(timeout=0).merge().generated_tokens for future in futures] == expected
    assert begun.index(False, 3) > 5, "the list has room for the first tokens"
    assert not any(begun[-20:])


@pytest.mark.parametrize("mode", ["persist", "recompute"])
@pytest.mark.usefixtures("device")
def test_penalties_count_the_same_tokens_after_suspensions_and_failed_passes(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = dict.fromkeys(range(3), 24)
    engine = captured_engine(kv_cache_management_mode=mode)
    futures = [add(engine, number, length, **PENALTIES) for number, length in lengths.items()]
    for _ in range(5):
        engine.step_modern()
    engine.suspend()
    engine.resume()
    for _ in range(3):
        engine.step_modern()
    engine.invalidate_prefix_cache()  # drops what has begun
    with monkeypatch.context() as failing:
        failing.setattr("megatron_runtime.engine.pass_graphs.CapturedPass.sample", fail)
        with pytest.raises(ValueError, match="of the test"):
            engine.step_modern()
    assert finish(engine, futures) == on_cpu(lengths, **PENALTIES)


def fail(*_: object) -> None:
    raise ValueError("of the test")

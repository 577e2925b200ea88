"""Only the newest attempt of a replica group may register, until some time after its loss."""

from __future__ import annotations

from megatron_runtime.data_parallel_inference_coordinator.engines import OUTDATED_SECONDS, EngineRegistry
from megatron_runtime.headers import EngineState
from megatron_runtime.wire.items import EngineLoad, Registration


def attempt(number: int, *, group: int = 0) -> Registration:
    return Registration(group, number, f"process {number}", EngineState.RUNNING, False, [], EngineLoad(), "")


def test_an_attempt_number_that_is_too_high_locks_others_out_for_a_limited_time() -> None:
    registry = EngineRegistry(sort_by_group=False)
    registry.register(b"huge", attempt(2**62), 0.0)
    assert "attempt 3 of replica group 0 is outdated" in str(registry.refusal(attempt(3), 1e6))
    assert registry.refusal(attempt(3, group=1), 0.0) is None
    registry.remove(b"huge", 1e6)
    assert registry.refusal(attempt(3), 1e6 + OUTDATED_SECONDS - 1)
    assert registry.refusal(attempt(3), 1e6 + OUTDATED_SECONDS) is None
    registry.register(b"true", attempt(3), 1e6 + OUTDATED_SECONDS)
    assert registry.refusal(attempt(4), 2e6) is None
    assert registry.refusal(attempt(2), 2e6)


def test_the_newest_attempt_may_register_again_at_any_time() -> None:
    registry = EngineRegistry(sort_by_group=False)
    registry.register(b"engine", attempt(3), 0.0)
    registry.remove(b"engine", 1.0)
    assert registry.refusal(attempt(3), 2.0) is None
    assert registry.refusal(attempt(3), 2.0 + OUTDATED_SECONDS) is None

"""Which of several operators may act, with a simulated clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_operator.handlers import Options
from megatron_operator.kubernetes.lease import LeaseName, LeaseTimings, LeaseView, micro_time

TERMS = LeaseTimings(15)
WALL = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def holder(name: str = "a", at: float = 0.0) -> tuple[LeaseView, dict[str, Any]]:
    """A claim that acquired a Lease without a holder, and the Lease."""
    claim = LeaseView(name, TERMS)
    claim.observe({}, at)
    spec = claim.desired_spec(WALL)
    claim.record_written(spec, at)
    return claim, spec


def test_the_first_operator_acquires_a_lease_without_a_holder() -> None:
    claim, spec = holder()
    assert claim.is_held(0.0)
    times = {"acquireTime": "2026-01-02T03:04:05.000678Z", "renewTime": "2026-01-02T03:04:05.000678Z"}
    assert spec == {"holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": 0, **times}


def test_a_renewal_keeps_acquire_time_and_transitions() -> None:
    claim, spec = holder()
    later = datetime(2026, 1, 2, 3, 4, 10, tzinfo=UTC)
    assert claim.desired_spec(later) == {**spec, "renewTime": micro_time(later)}


def test_a_holder_stops_before_others_may_acquire_the_lease() -> None:
    claim, _ = holder(at=100.0)
    assert (claim.is_held(109.9), claim.is_held(110.0)) == (True, False)
    assert (claim.seconds_left(104.0), claim.seconds_left(200.0)) == (6.0, 0.0)
    assert TERMS.renew_interval < TERMS.deadline < TERMS.seconds


def test_another_operator_waits_the_lease_duration_after_the_last_observed_change() -> None:
    _, spec = holder()
    other = LeaseView("b", LeaseTimings(3))
    other.observe(spec, 1000.0)
    other.observe(spec, 1010.0)
    assert other.seconds_until_free(1010.0) == 5.0
    other.observe({**spec, "renewTime": "1970-01-01T00:00:00.000000Z"}, 1014.0)
    assert (other.seconds_until_free(1028.0), other.seconds_until_free(1029.0)) == (1.0, 0.0)
    taken = other.desired_spec(WALL)
    assert (taken["holderIdentity"], taken["leaseDurationSeconds"], taken["leaseTransitions"]) == ("b", 3, 1)


def test_a_released_lease_can_be_acquired_at_once() -> None:
    claim, spec = holder()
    released = claim.release(spec, WALL)
    other = LeaseView("b", TERMS)
    other.observe(released, 0.0)
    assert (released["holderIdentity"], other.seconds_until_free(0.0)) == ("", 0.0)


def test_a_holder_that_reads_another_name_has_lost_the_lease() -> None:
    claim, spec = holder()
    claim.observe({**spec, "holderIdentity": "b"}, 1.0)
    assert not claim.is_held(1.0)
    assert claim.seconds_until_free(1.0) == 15.0


def test_a_deleted_lease_is_not_held_until_it_is_created_again() -> None:
    claim, _ = holder()
    claim.observe({}, 1.0)
    assert (claim.is_held(1.0), claim.seconds_until_free(1.0)) == (False, 0.0)


@pytest.mark.parametrize("text", ["", "megatron-operator", "megatron-system/", "/megatron-operator", "a/b/c"])
def test_an_invalid_lease_name_is_rejected_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="write NAMESPACE/NAME"):
        LeaseName.parse(text)


def test_a_lease_duration_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1 s"):
        LeaseTimings(0)


def test_under_the_kopf_command_the_environment_configures_the_lease() -> None:
    environment = {
        "MEGATRON_OPERATOR_LEASE": "system/ours",
        "MEGATRON_OPERATOR_LEASE_SECONDS": "30",
        "MEGATRON_OPERATOR_WATCH_SILENCE": "100",
    }
    options = Options.from_environment(environment)
    assert (options.lease, options.lease_timings) == (LeaseName("system", "ours"), LeaseTimings(30))
    assert options.watch_silence == 100
    assert Options.from_environment({}) == Options()


def test_an_invalid_number_is_rejected_with_the_name_of_its_variable() -> None:
    with pytest.raises(ValueError, match="MEGATRON_OPERATOR_LEASE_SECONDS: 15s is not a number"):
        Options.from_environment({"MEGATRON_OPERATOR_LEASE_SECONDS": "15s"})


@dataclass
class Server:
    """A Lease with optimistic concurrency: one of two writers of the same version succeeds."""

    spec: dict[str, Any] = field(default_factory=dict)
    version: int = 0


@dataclass
class Operator:
    """Reads and writes in separate steps, so that other steps can happen between them."""

    claim: LeaseView
    offset: float
    version: int = -1
    pending: tuple[dict[str, Any], float] | None = None

    def step(self, server: Server, now: float) -> None:
        """The next step: read, send a write, or receive its answer."""
        mine = now + self.offset
        if self.pending is not None:
            (spec, began), self.pending = self.pending, None
            if server.version == self.version:
                server.spec, server.version = spec, server.version + 1
                self.claim.record_written(spec, began)
            self.version = -1
        elif self.version == server.version and self.claim.seconds_until_free(mine) == 0:
            self.pending = (self.claim.desired_spec(datetime.fromtimestamp(mine, UTC)), mine)
        else:
            self.version = server.version
            self.claim.observe(server.spec, mine)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.1, 1.0, 4.0, 9.9, 10.1, 16.0])), max_size=200)


@settings(max_examples=300)
@given(STEPS, st.tuples(*[st.floats(-1e6, 1e6)] * 3))
def test_two_operators_never_hold_the_lease_at_once_with_any_delays_and_clocks(
    steps: list[tuple[int, float]], offsets: tuple[float, ...]
) -> None:
    server, now = Server(), 0.0
    operators = [Operator(LeaseView(name, TERMS), offset) for name, offset in zip("abc", offsets, strict=True)]
    for who, pause in steps:
        now += pause
        operators[who].step(server, now)
        assert sum(each.claim.is_held(now + each.offset) for each in operators) <= 1


def test_the_lease_is_held_while_all_operators_try() -> None:
    server = Server()
    operators = [Operator(LeaseView(name, TERMS), offset) for name, offset in (("a", 0.0), ("b", 50.0))]
    for turn in range(100):
        for each in operators[turn // 50 :]:  # The first operator is killed after half of the time.
            each.step(server, float(turn))
    assert operators[1].claim.is_held(149.0)
    assert server.spec["leaseTransitions"] == 1

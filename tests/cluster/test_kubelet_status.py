"""The simulated kubelet reports the same status of a pod as a real one."""

from __future__ import annotations

from pathlib import Path

from operator_support.kubelet_status import kubelet_status

from megatron_operator.local.pod_status import PodStatus
from megatron_operator.observed_state import PodPhase


def failed(message: str) -> PodStatus:
    return PodStatus(
        name="chat-g0-a0-0",
        namespace="default",
        uid="1",
        labels={},
        annotations={},
        phase=PodPhase.FAILED,
        ready=False,
        address="127.0.0.2",
        created_at=1000.0,
        log=Path("log"),
        started_at=1001.0,
        finished_at=1002.0,
        exit_code=2,
        reason="Error",
        message=message,
    )


def test_the_end_of_a_process_is_the_end_of_its_container() -> None:
    ended = kubelet_status(failed("no such model"), "main")["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (2, "Error", "no such model")
    assert ended["startedAt"] < ended["finishedAt"]

"""The paths by which vLLM's clients monitor and control a server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

PROMPT = "The capital of France is the city of Paris, and that of Italy is Rome. " * 4
ASKED = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
PROTECTED = [
    ("GET", "/server_info"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
]


def controlled(pod: Any, method: str, path: str, **headers: str) -> httpx.Response:
    """A request with the control token."""
    token = {"authorization": pod.control.headers["authorization"]}
    answer: httpx.Response = pod.http.request(method, path, headers=token | headers)
    return answer


def test_ping_load_and_metrics_need_no_token(shared_pod: Any) -> None:
    assert shared_pod.http.get("/ping").status_code == shared_pod.http.post("/ping").status_code == 200
    assert shared_pod.http.get("/load").json() == {"server_load": 0}
    shared_pod.post("/v1/completions", ASKED)
    text = shared_pod.http.get("/metrics").text
    assert 'megatron_requests_total{endpoint="/v1/completions",status="200"}' in text
    assert 'megatron_requests_running{replica_group="0"}' in text
    assert 'vllm:num_requests_waiting{model_name="chat"} 0.0' in text


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_control_needs_the_control_token(shared_pod: Any, method: str, path: str) -> None:
    assert shared_pod.http.request(method, path).status_code == 401
    wrong = shared_pod.http.request(method, path, headers={"authorization": "Bearer wrong"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_control_token")


def test_pages_from_elsewhere_can_not_control_the_service(shared_pod: Any) -> None:
    assert controlled(shared_pod, "POST", "/sleep", origin="http://elsewhere.example").status_code == 403
    assert shared_pod.state()["engineState"] == "RUNNING"


def test_the_server_describes_its_options(shared_pod: Any) -> None:
    config = controlled(shared_pod, "GET", "/server_info").json()["config"]
    assert (config["served_name"], config["max_sequence_length"]) == ("chat", 8192)
    assert not {"api_keys_file", "metrics_folder"} & set(config)


def test_a_sleeping_service_is_suspended_until_it_wakes_up(shared_pod: Any) -> None:
    assert controlled(shared_pod, "POST", "/sleep?level=2").json()["error"]["param"] == "level"
    assert controlled(shared_pod, "POST", "/wake_up").json()["error"]["code"] == "invalid_state"
    try:
        assert controlled(shared_pod, "POST", "/sleep?level=1").status_code == 200
        assert controlled(shared_pod, "GET", "/is_sleeping").json() == {"is_sleeping": True}
    finally:
        assert controlled(shared_pod, "POST", "/wake_up").status_code == 200
    assert controlled(shared_pod, "GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert shared_pod.post("/v1/completions", ASKED).status_code == 200


def test_a_reset_forgets_the_cached_prefixes(shared_pod: Any) -> None:
    def cached() -> int:
        usage = shared_pod.post("/v1/completions", ASKED).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert controlled(shared_pod, "POST", "/reset_prefix_cache").status_code == 200
    assert cached() == 0
    assert cached() > 0

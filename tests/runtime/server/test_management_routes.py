"""The paths by which vLLM's clients monitor and control a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from runtime_support.adapters import write_adapter
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.model

PROMPT = "The capital of France is the city of Paris, and that of Italy is Rome. " * 4
ASKED = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--threads-per-rank", "1", "--frontend-replicas", "1")
KEY = {"authorization": "Bearer first-key"}
PICKER_METRICS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:lora_requests_info",
}
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


def test_endpoint_pickers_need_no_key_for_the_load_alone(
    start_pod: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "tenant", AutoModelForCausalLM.from_pretrained(tiny_checkpoint))
    (tmp_path / "keys").write_text("first-key")
    flags = ("--model", str(tiny_checkpoint), *FLAGS, "--picker-metrics-without-key")
    flags = (*flags, f"--lora-modules=of-a-tenant={adapter}")
    pod = start_pod(*flags, MEGATRON_API_KEYS_FILE=str(tmp_path / "keys")).wait_ready()
    assert pod.http.post("/v1/completions", json=ASKED).status_code == 401
    answered = pod.http.post("/v1/completions", json={"model": "of-a-tenant", **ASKED}, headers=KEY)
    assert answered.status_code == 200

    without = pod.http.get("/metrics")
    assert without.status_code == 200
    shown = {family.name: family.samples for family in text_string_to_metric_families(without.text)}
    assert shown.keys() == PICKER_METRICS
    assert [len(samples) for samples in shown.values()] == [1] * len(shown)
    (info,) = shown.pop("vllm:lora_requests_info")
    assert info.labels == {"max_lora": "8", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert {tuple(sample.labels.items()) for (sample,) in shown.values()} == {(("model_name", "chat"),)}

    everything = pod.http.get("/metrics", headers=KEY).text
    assert 'running_lora_adapters="of-a-tenant"' in everything
    assert 'megatron_requests_total{endpoint="/v1/completions",status="200"}' in everything
    for wrong in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": ""}):
        assert pod.http.get("/metrics", headers=wrong).status_code == 401
    assert pod.http.get("/load").status_code == pod.http.get("/v1/models").status_code == 401
    assert pod.http.get("/load", headers=KEY).json() == {"server_load": 0}


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
        assert controlled(shared_pod, "POST", "/sleep?level=1&mode=keep").status_code == 200
        assert controlled(shared_pod, "GET", "/is_sleeping").json() == {"is_sleeping": True}
    finally:
        assert controlled(shared_pod, "POST", "/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert controlled(shared_pod, "GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert shared_pod.post("/v1/completions", ASKED).status_code == 200


@pytest.mark.parametrize(
    ("path", "param", "remedy"),
    [
        ("/sleep?mode=abort", "mode", "use keep, or leave it out"),
        ("/wake_up?tags=weights", "tags", "leave tags out, or give both weights and kv_cache"),
        ("/wake_up?tags=kv_cache&tags=scheduling", "tags", "leave tags out"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests", "leave it out"),
        ("/reset_prefix_cache?reset_external=true", "reset_external", "leave it out"),
    ],
)
def test_a_parameter_of_vllm_without_an_implementation_is_refused(
    shared_pod: Any, path: str, param: str, remedy: str
) -> None:
    refused = controlled(shared_pod, "POST", path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert remedy in refused.json()["error"]["message"]
    assert shared_pod.state()["engineState"] == "RUNNING"


def test_a_reset_forgets_the_cached_prefixes(shared_pod: Any) -> None:
    def cached() -> int:
        usage = shared_pod.post("/v1/completions", ASKED).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert controlled(shared_pod, "POST", "/reset_prefix_cache").status_code == 200
    assert cached() == 0
    assert cached() > 0

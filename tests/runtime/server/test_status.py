"""``GET /status``, and the files of the web page."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

KEY, OTHER_KEY = "key-of-the-tests", "key-of-others"


@pytest.fixture(scope="module")
def pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod of two replica groups that requires a key."""
    folder = tmp_path_factory.mktemp("pod")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n{OTHER_KEY}\n")
    model = write_tiny_checkpoint(folder / "tiny")
    flags = "--dtype float32 --kv-cache-memory 16Mi --frontend-replicas 1 --replica-groups 2"
    pod = pod_type(folder, "--model", str(model), *flags.split(), MEGATRON_API_KEYS_FILE=str(keys))
    try:
        pod.wait_for(lambda state: state["ready"] and len(state["replicaGroups"]) == 2)
        pod.http.headers["Authorization"] = f"Bearer {KEY}"
        yield pod
    finally:
        pod.end()


def status(pod: Any) -> dict[str, Any]:
    body: dict[str, Any] = pod.http.get("/status").json()
    return body


def test_the_status_follows_the_service(pod: Any) -> None:
    pod.wait_for(lambda _: [group["state"] for group in status(pod)["replica_groups"]] == ["RUNNING"] * 2, seconds=10)
    before = status(pod)
    assert (before["model"], before["state"], before["ready"]) == ("chat", "RUNNING", True)
    asked = {"prompt": "abc", "max_tokens": 16, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        pod.signal("pause")
        answers = [pool.submit(pod.post, "/v1/completions", asked) for _ in range(3)]
        pod.wait_for(lambda _: status(pod)["requests_waiting"] == 3, seconds=10)
        assert status(pod)["state"] == "PAUSED"
        assert sorted(group["requests_waiting"] for group in status(pod)["replica_groups"]) == [1, 2]
        pod.signal("unpause")
        assert [answer.result().status_code for answer in answers] == [200] * 3

    def generated(of: dict[str, Any]) -> int:
        return sum(group["generated_tokens"] for group in of["replica_groups"])

    pod.wait_for(lambda _: generated(status(pod)) == generated(before) + 48, seconds=10)
    after = status(pod)
    assert (after["state"], after["requests_running"], after["requests_waiting"]) == ("RUNNING", 0, 0)
    assert all(0 <= group["kv_usage"] <= 1 and group["ready"] for group in after["replica_groups"])


def test_a_key_does_not_see_what_another_one_asked(pod: Any) -> None:
    def cached(key: str, **fields: Any) -> int:
        asked = {"model": "chat", "prompt": "a prompt of several blocks, and some more", "max_tokens": 2, **fields}
        answer = pod.http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"}).json()
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached(KEY), cached(OTHER_KEY), cached(KEY, cache_salt="team")] == [0, 0, 0]
    assert min(cached(KEY), cached(OTHER_KEY), cached(KEY, cache_salt="team")) > 0
    assert cached(OTHER_KEY, cache_salt="team") == 0


def test_the_status_requires_a_key_and_the_page_does_not(pod: Any) -> None:
    no_key = {"Authorization": ""}
    assert pod.http.get("/status", headers=no_key).status_code == 401
    assert pod.http.get("/", headers=no_key).status_code == 200


def test_the_description_has_an_example_of_the_status(pod: Any) -> None:
    described = pod.http.get("/openapi.json").json()["paths"]["/status"]["get"]["responses"]["200"]
    example = described["content"]["application/json"]["example"]
    found = status(pod)
    assert example.keys() == found.keys()
    assert example["replica_groups"][0].keys() == found["replica_groups"][0].keys()


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/page.css", "/page/vendor/markdown-it.esm.min.mjs"])
def test_the_page_may_load_only_its_own_files(pod: Any, path: str) -> None:
    answer = pod.http.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = pod.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert pod.http.head(path).headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/", "/page/..%2fapp.py", "/page/%2e%2e/app.py"])
def test_no_other_files_are_served_below_the_page(pod: Any, path: str) -> None:
    answer = pod.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"

"""Valid and invalid requests generated from the server's OpenAPI description."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from schemathesis import GenerationMode
from suite_support.repetition import is_long, repeated

CHOSEN = os.environ.get("MEGATRON_API_CASES")
CASES = int(CHOSEN) if CHOSEN else repeated(120, 300)
"""Number of requests with a body."""
FEW = 5
"""Number of requests of each kind without a body."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod with short answers."""
    folder = tmp_path_factory.mktemp("pod")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
    model = write_tiny_checkpoint(folder / "tiny", longest=256, chat_template=template)
    flags = "--dtype float32 --kv-cache-memory 16Mi --frontend-replicas 1 --parsers hermes --parsers qwen3"
    pod = pod_type(folder, "--model", str(model), *flags.split(), "--request-timeout", "10")
    try:
        yield pod.wait_ready()
    finally:
        pod.end()


def described(pod: Any) -> dict[str, Any]:
    """The server's description, with the served model as the only value of ``model``."""
    schema: dict[str, Any] = pod.http.get("/openapi.json").json()
    for body in schema["components"]["schemas"].values():
        if "model" in body.get("properties", {}):
            body["properties"]["model"] = {"type": "string", "enum": ["chat"]}
    return schema


@pytest.mark.repetition
@pytest.mark.timeout(3600)
def test_no_valid_or_invalid_request_breaks_the_server(pod: Any) -> None:
    schema = schemathesis.openapi.from_dict(described(pod))
    operations = [result.ok() for result in schema.get_all_operations()]
    ways = [(operation, mode) for operation in operations for mode in (MODES if operation.body else MODES[:1])]
    share = CASES // sum(bool(operation.body) for operation, _ in ways)
    statuses: dict[int, int] = {}
    session = requests.Session()
    session.trust_env = False
    for operation, mode in ways:

        @settings(
            max_examples=share if operation.body else FEW,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=not is_long() and not CHOSEN,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answer = case.call(base_url=str(pod.http.base_url), session=session)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            said = json.dumps(case.body, default=repr)[:2000]
            assert answer.status_code < 500, f"{case.method} {case.path} {said}: {answer.text}"
            assert answer.status_code != 422

        check()
    assert statuses[200] > 0
    assert statuses[400] > 0
    assert pod.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200

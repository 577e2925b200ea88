"""Which requests share cached prefixes: those of one API key, or of all keys if the server says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.requests import Request

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import load_tokenizer
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.isolation import Isolation
from megatron_runtime.server.options import FrontendOptions, HttpOptions

Isolate = Callable[..., Isolation]


@pytest.fixture
def isolate(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Isolate]:
    """The isolation of a request with a key, in a server that shares prefixes or not."""
    client = InferenceClient("tcp://127.0.0.1:1", key="k" * 40)
    options = FrontendOptions(
        coordinator_address="tcp://127.0.0.1:1",
        tokenizer_path=str(tiny_checkpoint),
        served_name="chat",
        max_sequence_length=128,
        http=HttpOptions(shared_prefix_cache=request.param),
    )
    admission = AdmissionController(client, replica_group_wait=1.0, retry_after=1, max_in_flight=8)
    keys = ApiKeys(None, ["first", "second"])
    context = FrontendContext(options, client, load_tokenizer(tiny_checkpoint), admission, keys, None)

    def of(key: str, salt: str | None = None) -> Isolation:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return context.isolation(Request({"type": "http", "headers": headers}), salt)

    yield of
    client.stop()


@pytest.mark.parametrize("isolate", [False], indirect=True)
def test_each_key_has_prefixes_of_its_own(isolate: Isolate) -> None:
    salts = [isolate(key, salt).cache_salt for key in ("first", "second") for salt in (None, "team")]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("isolate", [True], indirect=True)
def test_keys_share_prefixes_if_the_server_says_so_and_stay_tenants(isolate: Isolate) -> None:
    assert isolate("first").cache_salt == isolate("second").cache_salt
    assert isolate("first", "team").cache_salt == isolate("second", "team").cache_salt != isolate("first").cache_salt
    assert isolate("first").tenant != isolate("second").tenant

"""Which requests share cached prefixes: those of one API key, or of all keys if the server says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.requests import Request

from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.isolation import Isolation

Isolate = Callable[..., Isolation]


@pytest.fixture
def isolate(request: pytest.FixtureRequest, make_context: Callable[..., FrontendContext]) -> Isolate:
    """The isolation of a request with a key, in a server that shares prefixes or not."""
    context = make_context(["first", "second"], shared_prefix_cache=request.param)

    def of(key: str, salt: str | None = None) -> Isolation:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return context.isolation(Request({"type": "http", "headers": headers}), salt)

    return of


@pytest.mark.parametrize("isolate", [False], indirect=True)
def test_each_key_has_prefixes_of_its_own(isolate: Isolate) -> None:
    salts = [isolate(key, salt).cache_salt for key in ("first", "second") for salt in (None, "team")]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("isolate", [True], indirect=True)
def test_keys_share_prefixes_if_the_server_says_so_and_stay_tenants(isolate: Isolate) -> None:
    assert isolate("first").cache_salt == isolate("second").cache_salt
    assert isolate("first", "team").cache_salt == isolate("second", "team").cache_salt != isolate("first").cache_salt
    assert isolate("first").tenant != isolate("second").tenant

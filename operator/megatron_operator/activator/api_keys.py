"""API keys of models that do not run. A server checks the keys of a model that runs, by the same rules."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http
import time
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_operator.activator.refusal import Refusal, unavailable
from megatron_operator.activator.shared_calls import SharedCalls
from megatron_operator.api.v1alpha1.serving import ApiKeysSecret
from megatron_operator.idle_stop import LOOK_INTERVAL
from megatron_operator.observed_state import ActionRefused

Object = Mapping[str, Any]
Selector = tuple[str, str, str]
"""Namespace and name of a Secret, and the key within it."""
DEFAULT_KEY = str(ApiKeysSecret.model_fields["key"].default)
"""For API servers that do not fill it in."""


class Secrets(Protocol):
    """The part of the API server's client that the check needs."""

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None when the object does not exist. Raises AdapterError."""
        ...


class KeySecrets:
    """The Secrets with API keys, each read at most every ``LOOK_INTERVAL`` seconds."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._reads = SharedCalls[tuple[bytes, ...]]("read the API keys")
        self._digests: dict[Selector, tuple[float, tuple[bytes, ...]]] = {}
        """When they expire, and the digests of the keys."""

    async def check(self, resource: Object, headers: Mapping[str, str]) -> None:
        """Raises Refusal 401 unless the request carries a key of the resource, or the resource has no keys; 503 when
        the keys cannot be read. Raises AdapterError without an API server."""
        selector = secret_of(resource)
        if selector is None:
            return
        expires, digests = self._digests.get(selector, (0.0, ()))
        if expires < time.monotonic():
            digests = await self._reads.get(selector, lambda: self._read(selector))
        if not matches(digests, headers.get("Authorization", ""), headers.get("X-Api-Key", "")):
            words = "no valid API key: send one as Authorization: Bearer <key>, or as X-Api-Key: <key>"
            raise Refusal(words, http.HTTPStatus.UNAUTHORIZED, code="invalid_api_key")

    async def close(self) -> None:
        """Cancel open requests to the API server."""
        await self._reads.close()

    async def _read(self, selector: Selector) -> tuple[bytes, ...]:
        namespace, name, key = selector
        began = time.monotonic()
        try:
            secret = await self._secrets.get("Secret", namespace, name)
        except ActionRefused as refused:
            fix = "add it to activator.apiKeySecrets of the operator's chart"
            raise unavailable(f"the activator may not read the API keys in the Secret {name}; {fix}") from refused
        text = ((secret or {}).get("data") or {}).get(key)
        if text is None:
            words = f"there is no Secret {name} with the key {key}, which has the API keys of the model; create it"
            raise unavailable(words)
        found = digests_of(base64.b64decode(text).decode(errors="replace"))
        self._digests[selector] = began + LOOK_INTERVAL, found
        return found


def secret_of(resource: Object) -> Selector | None:
    """The Secret with the API keys of a resource; None for a model that is open to everyone."""
    selected = ((resource.get("spec") or {}).get("frontend") or {}).get("apiKeysSecret")
    if not selected:
        return None
    return resource["metadata"]["namespace"], selected["name"], selected.get("key") or DEFAULT_KEY


def digests_of(text: str) -> tuple[bytes, ...]:
    """The digests of the keys: one per line, except empty lines and comments."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(_digest(line) for line in lines if line and not line.startswith("#"))


def matches(digests: tuple[bytes, ...], authorization: str, key: str) -> bool:
    """Whether one of the headers ``Authorization`` and ``X-Api-Key`` carries one of the keys."""
    scheme, _, token = authorization.partition(" ")
    given = [_digest(each.strip()) for each in (token if scheme.lower() == "bearer" else "", key)]
    # All keys are compared, each in constant time, so that the duration reveals nothing about them.
    return sum(hmac.compare_digest(each, digest) for each in given for digest in digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

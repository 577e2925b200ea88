"""API keys of models, checked before a body is read, and before a model is started.

A server checks the keys of a model that runs, by the same rules. It may know more of them than its Secret has.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_operator.activator.refusal import Refusal, unavailable
from megatron_operator.activator.shared_calls import SharedCalls
from megatron_operator.api.v1alpha1.serving import ApiKeysSecret
from megatron_operator.idle_stop import LOOK_INTERVAL
from megatron_operator.observed_state import ActionRefused, AdapterError

Object = Mapping[str, Any]
Selector = tuple[str, str, str]
"""Namespace and name of a Secret, and the key within it."""
KEY_FLAG = "--api-key"
"""Flag of servers for keys that are in no Secret."""
UNKNOWN_KEY_BYTES = 64 << 10
"""Bytes of a body with a key that is none of the Secret's. It may be the control token, whose requests are short."""
MOST_SECRETS = 20
"""Secrets of an endpoint's models that are compared before the body names one of them."""
DEFAULT_KEY = str(ApiKeysSecret.model_fields["key"].default)
"""For API servers that do not fill it in."""


Found = tuple[bytes, ...] | str
"""The digests of the keys of a Secret, or why they are not known."""


class Secrets(Protocol):
    """The part of the API server's client that the check needs."""

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None when the object does not exist. Raises AdapterError."""
        ...


@dataclass(frozen=True)
class KeyRule:
    """The keys that a model requires."""

    secret: Selector
    has_others: bool = False
    """Whether its server knows keys that are not in the Secret."""


class KeySecrets:
    """The Secrets with API keys, each read at most every ``LOOK_INTERVAL`` seconds."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._reads = SharedCalls[Found]("read the API keys")
        self._found: dict[Selector, tuple[float, Found]] = {}
        """When they expire, and what was found."""

    async def check(self, resource: Object, headers: Mapping[str, str]) -> None:
        """Raises Refusal 401 unless the request carries a key of the resource, or the resource has no keys; 503 when
        the keys cannot be read."""
        rule = rule_of(resource)
        if rule is None:
            return
        found = await self._get(rule.secret)
        if isinstance(found, str):
            raise unavailable(found)
        if not matches(found, *_given(headers)):
            raise _invalid_key()

    async def longest_body(self, rules: Collection[KeyRule | None], headers: Mapping[str, str]) -> int | None:
        """Bytes that the body of a request for a model with one of these rules may have; None: there is no limit.

        None is also the answer where the keys are not known, as without the right to read the Secret: the server of the
        model checks them. Raises Refusal 401 for a request without a key if all models require one.
        """
        required = {rule for rule in rules if rule is not None}
        if not required or len(required) < len(set(rules)):
            return None
        if not _keys(*_given(headers)):
            raise _invalid_key()
        secrets = {rule.secret for rule in required}
        if len(secrets) > MOST_SECRETS or any(rule.has_others for rule in required):
            return None
        for secret in secrets:
            found = await self._get(secret)
            if isinstance(found, str) or matches(found, *_given(headers)):
                return None
        return UNKNOWN_KEY_BYTES

    async def close(self) -> None:
        """Cancel open requests to the API server."""
        await self._reads.close()

    async def _get(self, secret: Selector) -> Found:
        expires, found = self._found.get(secret, (0.0, ""))
        if time.monotonic() < expires:
            return found
        return await self._reads.get(secret, lambda: self._read(secret))

    async def _read(self, secret: Selector) -> Found:
        began = time.monotonic()
        try:
            found = await self._look(secret)
        except AdapterError:
            _, found = self._found.get(secret, (0.0, "the API server does not answer, so the API keys are unknown"))
        self._found[secret] = began + LOOK_INTERVAL, found
        return found

    async def _look(self, secret: Selector) -> Found:
        namespace, name, key = secret
        try:
            obj = await self._secrets.get("Secret", namespace, name)
        except ActionRefused:
            fix = "add it to activator.apiKeySecrets of the operator's chart"
            return f"the activator may not read the API keys in the Secret {name}; {fix}"
        text = ((obj or {}).get("data") or {}).get(key)
        if text is None:
            return f"there is no Secret {name} with the key {key}, which has the API keys of the model; create it"
        return digests_of(base64.b64decode(text).decode(errors="replace"))


def secret_of(resource: Object) -> Selector | None:
    """The Secret with the API keys of a resource; None for a model that is open to everyone."""
    selected = ((resource.get("spec") or {}).get("frontend") or {}).get("apiKeysSecret")
    if not selected:
        return None
    return resource["metadata"]["namespace"], selected["name"], selected.get("key") or DEFAULT_KEY


def rule_of(resource: Object) -> KeyRule | None:
    """The keys that a resource requires; None for a model that is open to everyone."""
    secret = secret_of(resource)
    if secret is None:
        return None
    flags = ((resource.get("spec") or {}).get("engine") or {}).get("extraArgs") or ()
    return KeyRule(secret, any(str(flag).startswith(KEY_FLAG) for flag in flags))


def digests_of(text: str) -> tuple[bytes, ...]:
    """The digests of the keys: one per line, except empty lines and comments."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(_digest(line) for line in lines if line and not line.startswith("#"))


def _given(headers: Mapping[str, str]) -> tuple[str, str]:
    """The two headers that may carry a key."""
    return headers.get("Authorization", ""), headers.get("X-Api-Key", "")


def _keys(authorization: str, key: str) -> list[str]:
    """The keys in these headers: in ``Authorization`` only with the scheme of keys."""
    scheme, _, token = authorization.strip().partition(" ")
    return [each.strip() for each in (token if scheme.lower() == "bearer" else "", key) if each.strip()]


def _invalid_key() -> Refusal:
    words = "no valid API key: send one as Authorization: Bearer <key>, or as X-Api-Key: <key>"
    return Refusal(words, http.HTTPStatus.UNAUTHORIZED, code="invalid_api_key")


def matches(digests: tuple[bytes, ...], authorization: str, key: str) -> bool:
    """Whether one of the headers ``Authorization`` and ``X-Api-Key`` carries one of the keys."""
    given = [_digest(each) for each in _keys(authorization, key)]
    # All keys are compared, each in constant time, so that the duration reveals nothing about them.
    return sum(hmac.compare_digest(each, digest) for each in given for digest in digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

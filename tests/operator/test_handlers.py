"""The log of the operator on clusters without optional kinds."""

from __future__ import annotations

import logging

import pytest
from kopf._cogs.structs.references import Selector

from megatron_operator.handlers import is_news
from megatron_operator.kubernetes.api_server import group_version_plural


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["HTTPRoute"], False),
        (["InferencePool"], False),
        (["InferencePool", "HTTPRoute"], False),
        (["Ingress"], True),
        (["HTTPRoute", "Ingress"], True),
        (["HTTPRoute", "InferencePool", "MegatronInference"], True),
    ],
)
def test_a_missing_optional_kind_is_no_news(kinds: list[str], expected: bool) -> None:
    listed = ", ".join(f"{Selector(*group_version_plural(kind))}" for kind in kinds)
    words = f"Unresolved resources cannot be served (try creating their CRDs): {listed}"
    assert is_news(logging.LogRecord("kopf", logging.WARNING, "", 0, words, None, None)) is expected


def test_other_messages_are_news() -> None:
    assert is_news(logging.LogRecord("kopf", logging.WARNING, "", 0, "the API server is away", None, None))

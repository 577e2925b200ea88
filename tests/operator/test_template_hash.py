"""The hashes that decide whether children are applied again, and pods replaced."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.resources import parsed

from megatron_operator import names
from megatron_operator.render import render_children
from megatron_operator.settings import Settings


def test_a_changed_resource_changes_the_applied_hash_of_the_affected_child_alone() -> None:
    first, again = render_children(parsed(), Settings()), render_children(parsed(), Settings())
    assert first == again
    other = render_children(parsed(expose={"service": {"type": "NodePort"}}), Settings())
    changed = [
        manifest["metadata"]["name"]
        for manifest, before in zip(other, first, strict=True)
        if names.applied_hash(manifest["metadata"]) != names.applied_hash(before["metadata"])
    ]
    assert changed == ["chat"]


@pytest.mark.parametrize("spec", [{"replicas": 3}, {"lifecycle": "Paused"}, {"failurePolicy": {"maxRestarts": 1}}])
def test_fields_that_do_not_affect_pods_do_not_change_the_template_hash(spec: dict[str, Any]) -> None:
    assert names.template_hash(parsed(**spec), "i") == names.template_hash(parsed(), "i")


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"maxRequests": 1}},
        {"model": {"source": {"image": {"reference": "registry/m:2"}}}},
        {"restart": {"id": "1"}},
        {"podTemplate": {"spec": {"hostNetwork": True}}},
    ],
)
def test_fields_that_affect_pods_change_the_template_hash(spec: dict[str, Any]) -> None:
    assert names.template_hash(parsed(**spec), "i") != names.template_hash(parsed(), "i")


def test_another_image_of_spec_or_operator_changes_the_template_hash() -> None:
    assert names.template_hash(parsed(), "old") != names.template_hash(parsed(), "new")


def test_a_kv_cache_of_the_previous_default_size_replaces_no_pods() -> None:
    """Resources from before the size was optional have 1Gi, and a hash that does not cover it."""
    hashes = {
        (device, size): names.template_hash(
            parsed(pods={"device": device}, engine={} if size is None else {"kvCacheMemory": size}), "i"
        )
        for device in ("cpu", "cuda")
        for size in (None, "1Gi", "2Gi")
    }
    assert hashes["cpu", None] == hashes["cpu", "1Gi"] == "c1abc46221f6"
    assert hashes["cuda", "1Gi"] == "4f7aec63c52c"
    assert len(set(hashes.values())) == 5


def test_an_explicit_default_does_not_change_the_template_hash() -> None:
    written = parsed(engine={"maxRequests": 256}, rollout={"drainTimeout": "60s"})
    assert names.template_hash(written, "i") == names.template_hash(parsed(), "i")

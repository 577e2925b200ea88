"""The findings of `doctor` about activators."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.resources import resource_object

from megatron_operator.commands.activator_diagnosis import activators, key_secrets
from megatron_operator.commands.diagnosis import Level

IDLE = {"idleAfter": "1h", "stopAfter": "30m"}


def deployment(*args: str, available: int = 2) -> dict[str, Any]:
    container = {"name": "activator", "image": "operator:1", "args": list(args)}
    return {
        "metadata": {"namespace": "system", "name": "activator"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": available},
    }


@pytest.mark.parametrize(
    ("found", "idle", "level", "words"),
    [
        ([], False, Level.OK, "it is optional"),
        ([], True, Level.WARN, "the pods of chat are never stopped"),
        ([deployment()], True, Level.OK, "system/activator runs as operator:1"),
        ([deployment(available=0)], False, Level.MISSING, "0 of 2 pods are available"),
        (
            [deployment("--namespace=other")],
            True,
            Level.MISSING,
            "does not serve models, which has chat",
        ),
        ([deployment("--namespace=other"), deployment("--namespace=models")], True, Level.OK, "runs as operator:1"),
    ],
)
def test_a_model_that_is_stopped_when_idle_needs_an_activator(
    found: list[Any], idle: bool, level: Level, words: str
) -> None:
    resources = [resource_object(autoSuspend=IDLE if idle else {"stopAfter": "0s"}), resource_object("other")]
    (finding,) = activators(found, resources, "models", "1")
    assert finding.level is level
    assert words in finding.words


def test_an_activator_reads_the_keys_of_models_that_it_starts_only() -> None:
    users, others = ({"apiKeysSecret": {"name": name}} for name in ("users", "others"))
    resources = [
        resource_object(frontend=users, autoSuspend=IDLE),
        resource_object("again", frontend=users, autoSuspend=IDLE),
        resource_object("open", autoSuspend=IDLE),
        resource_object("always", frontend=others),
        resource_object("wrong", frontend=others, autoSuspend={"stopAfter": "soon"}),
    ]
    assert key_secrets(resources) == ["users"]

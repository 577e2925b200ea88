"""Checks of activators, from API objects. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_operator.activator.api_keys import secret_of
from megatron_operator.activator.models import may_stop
from megatron_operator.commands.diagnosis import Finding, Level, deployed, full_name, rights, watched
from megatron_operator.commands.operator_rights import Right

Object = Mapping[str, Any]

LABELS = {"app.kubernetes.io/name": "megatron-activator"}
"""Labels of Deployments of activators, in the chart."""
ENABLE = "set activator.enabled of the operator's chart"
GRANT = "upgrade the operator's chart, and name the Secrets of API keys in its value activator.apiKeySecrets"


def activators(
    deployments: Sequence[Object], resources: Sequence[Object], namespace: str, version: str
) -> Iterator[Finding]:
    """Whether there is an activator for the resources of the namespace that need one."""
    subject = "activator"
    idle = ", ".join(sorted(each["metadata"]["name"] for each in resources if may_stop(each)))
    never = f"so the pods of {idle} are never stopped (spec.autoSuspend.stopAfter)"
    here = [each for each in deployments if not (only := watched(each)) or namespace in only]
    if not deployments:
        yield (
            Finding(Level.WARN, subject, f"the cluster has no Deployment of it, {never}", ENABLE)
            if idle
            else Finding(Level.OK, subject, "is not installed; it is optional")
        )
    elif not here and idle:
        words = f"{', '.join(map(full_name, deployments))} does not serve {namespace}, which has {idle} with stopAfter"
        yield Finding(Level.MISSING, subject, words, f"add {namespace} to the chart's value `namespaces`")
    for each in here:
        yield deployed(subject, each, version)


def activator_rights(account: str, denied: Sequence[Right]) -> Finding:
    """``denied`` are the missing rights of an activator's account."""
    return rights(account, [str(each) for each in denied], "activator", GRANT)


def key_secrets(resources: Sequence[Object]) -> list[str]:
    """Names of the Secrets with API keys that an activator has to read, because it may start their models."""
    found = (secret_of(each) for each in resources if may_stop(each))
    return sorted({selector[1] for selector in found if selector is not None})

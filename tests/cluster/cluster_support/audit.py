"""What was asked of an API server, by its own audit log."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # The controllers' own accounts live in kube-system, and ask all the time.
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
"""Who asked what, of the ServiceAccounts alone, without bodies, which may hold secrets."""


@dataclass(frozen=True, order=True)
class Right:
    """A verb on a kind of object. ``group`` is empty for the core; ``resource`` may be like `pods/log`."""

    group: str
    resource: str
    verb: str


@dataclass(frozen=True)
class Request:
    """One request of a ServiceAccount."""

    right: Right
    name: str
    status: int


def flags(folder: Path) -> list[str]:
    """Of a kube-apiserver whose audit log is to be in ``folder``."""
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps(POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log(folder)}"]


def log(folder: Path) -> Path:
    return folder / "audit.log"


def requests_of(folder: Path, service_account: str, namespace: str) -> Iterator[Request]:
    """All so far, those about objects alone: discovery and health are open to everyone."""
    for line in log(folder).read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        about = entry.get("objectRef")
        if entry["user"]["username"] != f"system:serviceaccount:{namespace}:{service_account}" or not about:
            continue
        resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        if resource:
            right = Right(about.get("apiGroup", ""), resource, entry["verb"])
            yield Request(right, about.get("name", ""), entry.get("responseStatus", {}).get("code", 0))

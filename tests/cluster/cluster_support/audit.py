"""The requests to an API server, from its audit log."""

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
        # The controllers' accounts are in kube-system, and send requests all the time.
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
"""Audit policy: metadata of the requests of ServiceAccounts, without bodies, which may contain secrets."""


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
    """Flags for a kube-apiserver with its audit log in ``folder``."""
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps(POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log(folder)}"]


def log(folder: Path) -> Path:
    return folder / "audit.log"


def requests_of(folder: Path, service_account: str, namespace: str) -> Iterator[Request]:
    """All requests about objects so far; discovery and health need no permissions."""
    seen: set[str] = set()
    for line in log(folder).read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        about = entry.get("objectRef")
        if entry["user"]["username"] != f"system:serviceaccount:{namespace}:{service_account}" or not about:
            continue
        # A watch has an entry at its start and one at its end.
        if entry["auditID"] in seen:
            continue
        seen.add(entry["auditID"])
        resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        if resource:
            right = Right(about.get("apiGroup", ""), resource, entry["verb"])
            yield Request(right, about.get("name", ""), entry.get("responseStatus", {}).get("code", 0))

"""The ServiceAccount of an activator in the namespace of a test."""

from pathlib import Path

from chart_support.helm import Helm, of_kind
from operator_support.resource import Resource


async def activator_kubeconfig(chat: Resource, helm: Helm, *flags: str) -> Path:
    """A kubeconfig with the permissions of the chart, with these flags, in the namespace of the resource."""
    roles = of_kind(helm.template("--set=activator.enabled=true", *flags), "ClusterRole")
    (rules,) = [role["rules"] for role in roles if role["metadata"]["name"].endswith("-activator")]
    await chat.kubectl("create", "serviceaccount", "activator")
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "activator"}}
    await chat.apply({**role, "rules": rules})
    subject = f"--serviceaccount={chat.namespace}:activator"
    await chat.kubectl("create", "rolebinding", "activator", "--role=activator", subject)
    return chat.cluster.kubeconfig_for("activator", chat.namespace)

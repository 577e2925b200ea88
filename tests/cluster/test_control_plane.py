"""The control plane of the tests behaves like Kubernetes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_support import audit
from cluster_support.cluster import Cluster, wait_until
from cluster_support.control_plane import ControlPlane
from cluster_support.errors import CommandFailedError

GROUP = "tests.megatron.dev"
DEFINITION = f"gadgets.{GROUP}"


def config_map(name: str, owner: dict[str, Any] | None = None, **data: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if owner:
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        metadata["ownerReferences"] = [reference | {key: owner["metadata"][key] for key in ("name", "uid")}]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def gadget(name: str, size: int) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/v1", "kind": "Gadget", "metadata": {"name": name}, "spec": {"size": size}}


def gadget_definition() -> dict[str, Any]:
    spec = {"type": "object", "properties": {"size": {"type": "integer", "minimum": 1}}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "Gadget", "plural": "gadgets", "singular": "gadget"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture(scope="module")
def gadgets(control_plane: Cluster) -> Iterator[None]:
    """A custom resource, established."""
    control_plane.define(gadget_definition())
    yield
    control_plane.kubectl("delete", "crd", DEFINITION, "--wait=false")


def test_the_api_answers_with_its_version(control_plane: Cluster) -> None:
    answer = json.loads(control_plane.kubectl("get", "--raw", "/version"))
    assert answer["gitVersion"] == control_plane.version


def test_a_new_namespace_accepts_pods_at_once(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("-n", namespace, "run", "sleeper", "--image=sleeper")
    assert control_plane.exists("-n", namespace, "pod", "sleeper")


@pytest.mark.usefixtures("gadgets")
def test_an_object_of_a_defined_kind_can_be_stored(control_plane: Cluster, namespace: str) -> None:
    control_plane.apply(namespace, gadget("one", size=3))
    assert control_plane.get("-n", namespace, DEFINITION, "one")["spec"] == {"size": 3}


@pytest.mark.usefixtures("gadgets")
def test_the_schema_of_a_defined_kind_is_enforced(control_plane: Cluster, namespace: str) -> None:
    with pytest.raises(CommandFailedError, match=r"spec\.size"):
        control_plane.apply(namespace, gadget("none", size=0))


def child_in(namespace: str) -> str:
    """The path of the child; a request for it takes less CPU time than a process of kubectl."""
    return f"/api/v1/namespaces/{namespace}/configmaps/child"


@pytest.mark.usefixtures("controllers")
def test_children_are_deleted_with_their_owner(control_plane: Cluster, namespace: str) -> None:
    control_plane.apply(namespace, config_map("owner"))
    owner = control_plane.get("-n", namespace, "configmap", "owner")
    control_plane.apply(namespace, config_map("child", owner), config_map("stranger"))
    control_plane.kubectl("-n", namespace, "delete", "configmap", "owner")
    wait_until(lambda: control_plane.read(child_in(namespace)) is None, "the child to go")
    assert control_plane.exists("-n", namespace, "configmap", "stranger")


@pytest.mark.usefixtures("controllers", "gadgets")
def test_children_are_deleted_with_their_owner_of_a_defined_kind(control_plane: Cluster, namespace: str) -> None:
    control_plane.apply(namespace, gadget("owner", size=1))
    owner = control_plane.get("-n", namespace, DEFINITION, "owner")
    control_plane.apply(namespace, config_map("child", owner))
    control_plane.kubectl("-n", namespace, "delete", DEFINITION, "owner")
    wait_until(lambda: control_plane.read(child_in(namespace)) is None, "the child to go", timeout=90)
    assert not control_plane.exists("-n", namespace, "configmap", "child")


def test_server_side_apply_leaves_the_fields_of_other_managers_alone(control_plane: Cluster, namespace: str) -> None:
    control_plane.apply(namespace, config_map("shared", ours="1"), manager="us")
    control_plane.apply(namespace, config_map("shared", theirs="2"), manager="them")
    control_plane.apply(namespace, config_map("shared"), manager="us")
    assert control_plane.get("-n", namespace, "configmap", "shared")["data"] == {"theirs": "2"}


def test_server_side_apply_refuses_a_field_that_another_manager_holds(control_plane: Cluster, namespace: str) -> None:
    control_plane.apply(namespace, config_map("shared", colour="red"), manager="us")
    with pytest.raises(CommandFailedError, match='conflict with "us"'):
        control_plane.apply(namespace, config_map("shared", colour="blue"), manager="them")


def test_a_service_account_may_do_what_its_role_grants_and_no_more(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    control_plane.kubectl("-n", namespace, "create", "role", "reader", "--verb=get,list", "--resource=configmaps")
    subject = f"--serviceaccount={namespace}:reader"
    control_plane.kubectl("-n", namespace, "create", "rolebinding", "reader", "--role=reader", subject)
    reader = control_plane.kubeconfig_for("reader", namespace)
    control_plane.kubectl("-n", namespace, "get", "configmaps", kubeconfig=reader)
    with pytest.raises(CommandFailedError, match="forbidden"):
        control_plane.kubectl("-n", namespace, "get", "secrets", kubeconfig=reader)


def test_the_audit_log_counts_a_watch_as_one_request(own_control_plane: ControlPlane, namespace: str) -> None:
    own_control_plane.kubectl("-n", namespace, "create", "serviceaccount", "watcher")
    grant = ("watcher", "--clusterrole=view", f"--serviceaccount={namespace}:watcher")
    own_control_plane.kubectl("-n", namespace, "create", "rolebinding", *grant)
    path = f"/api/v1/namespaces/{namespace}/configmaps?watch=true&timeoutSeconds=1"
    own_control_plane.kubectl("get", "--raw", path, kubeconfig=own_control_plane.kubeconfig_for("watcher", namespace))
    own_control_plane.apply(namespace, config_map("later"))
    requests = audit.requests_of(own_control_plane.logs, "watcher", namespace)
    assert [request.right.verb for request in requests] == ["watch"]


def test_data_survives_a_restart_of_the_api_server(own_control_plane: ControlPlane, namespace: str) -> None:
    own_control_plane.apply(namespace, config_map("kept", word="still here"))
    before = own_control_plane.pids()
    own_control_plane.restart_apiserver()
    after = own_control_plane.pids()
    assert own_control_plane.get("-n", namespace, "configmap", "kept")["data"] == {"word": "still here"}
    restarted = {name for name in before if after[name] != before[name]}
    assert restarted in ({"kube-apiserver"}, {"kube-apiserver", "apiextensions-apiserver"})


def test_the_api_server_is_unready_without_etcd_and_comes_back_with_it(
    own_control_plane: ControlPlane, namespace: str
) -> None:
    own_control_plane.apply(namespace, config_map("kept", word="still here"))
    own_control_plane.stop_etcd()
    try:
        assert not own_control_plane.is_ready()
    finally:
        own_control_plane.start_etcd()
        own_control_plane.wait_until_ready()
    assert own_control_plane.exists("-n", namespace, "configmap", "kept")

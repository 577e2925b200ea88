"""Releases of the chart, with real Helm on a real API server."""

import asyncio
import json
from pathlib import Path

import pytest
from chart_support.helm import CHART, NAMESPACE, REGISTRY, Object
from chart_support.release import NAME, Release, older_chart
from cluster_support.cluster import Cluster, wait_until
from cluster_support.errors import CommandFailedError
from operator_support.api import Api
from operator_support.resource import Resource, manifest
from operator_support.scripted_node import ScriptedNode
from suite_support.console_runs import documented
from suite_support.doc_blocks import Step, doc_blocks
from suite_support.doc_shell import DocShell, assert_table

from megatron_operator.api.crd import crd

DEFINITION = "megatroninferences.inference.megatron.dev"


def make(cluster: Cluster, namespace: str, name: str = "chat") -> str:
    """Creates a resource; returns its uid."""
    create = ("create", "-n", namespace, "--validate=false", "-o", "json", "-f", "-")
    made: Object = json.loads(cluster.kubectl(*create, input=json.dumps(manifest(name, routing={"alpha": 0.75}))))
    return str(made["metadata"]["uid"])


def resource(cluster: Cluster, namespace: str) -> Object:
    return cluster.get("mi", "chat", "-n", namespace)


def install_as_in_the_docs(installer: DocShell, cluster: Cluster, install: Step) -> None:
    """Returns when the kind of the CRD is served."""
    installer.run(install.command)
    cluster.until_served(crd())


def until_served(cluster: Cluster, namespace: str) -> None:
    """Waits until the operator has created pods."""
    pod = f"/api/v1/namespaces/{namespace}/pods/chat-0-0-0"
    wait_until(lambda: cluster.read(pod) is not None, "the first pod", timeout=60)


@pytest.fixture
def namespace(bare_control_plane: Cluster) -> str:
    """A new namespace on the chart's control plane."""
    return bare_control_plane.make_namespace()


@pytest.mark.parametrize(
    "flags", [(), ("--set=operator.podDisruptionBudgets=false", "--set=operator.modelCaches=false")]
)
def test_a_release_has_the_rights_that_its_operator_needs(
    release: Release, bare_control_plane: Cluster, namespace: str, flags: tuple[str, ...]
) -> None:
    release.install(*flags)
    rules = bare_control_plane.get("clusterrole", NAME)["rules"]
    optional = {"poddisruptionbudgets", "jobs", "persistentvolumeclaims"}
    granted = {resource for rule in rules for resource in rule["resources"]}
    assert granted & optional == (set() if flags else optional)
    with release.operator() as operator:
        make(bare_control_plane, namespace)
        until_served(bare_control_plane, namespace)
    assert "forbidden" not in operator.log.read_text()


def test_an_upgrade_from_the_version_before_brings_new_fields_and_keeps_the_resources(
    release: Release, installer: DocShell, bare_control_plane: Cluster, namespace: str, tmp_path: Path
) -> None:
    upgrade, uninstall = documented("docs/install.md", "helm upgrade megatron")
    release.install(chart=older_chart(release.helm, tmp_path, "0.0.9", "alpha"))
    uid = make(bare_control_plane, namespace)
    assert "alpha" not in resource(bare_control_plane, namespace)["spec"]["routing"]
    old_image = release.deployment()["spec"]["template"]["spec"]["containers"][0]["image"]
    installer.run(upgrade.command)
    patch = ("--type=merge", "-p", '{"spec": {"routing": {"alpha": 0.75}}}')
    bare_control_plane.kubectl("patch", "mi", "chat", "-n", namespace, *patch)
    found = resource(bare_control_plane, namespace)
    assert (found["metadata"]["uid"], found["spec"]["routing"]["alpha"]) == (uid, 0.75)
    image = release.deployment()["spec"]["template"]["spec"]["containers"][0]["image"]
    repository = "localhost/megatron-inference/operator"
    assert (old_image, image) == (f"{repository}:0.0.9", f"{repository}:0.1.0")
    with release.operator():
        until_served(bare_control_plane, namespace)
    installer.run(uninstall.command)
    assert not bare_control_plane.exists("deployment", "-n", NAMESPACE)


def test_resources_and_their_definition_survive_the_release_and_are_adopted_by_its_successor(
    release: Release, installer: DocShell, bare_control_plane: Cluster, namespace: str
) -> None:
    (install,) = documented("docs/examples.md", "kind create cluster")
    removal = documented("docs/install.md", "kubectl delete megatroninferences")
    install_as_in_the_docs(installer, bare_control_plane, install)
    uid = make(bare_control_plane, namespace)
    assert DEFINITION in release.uninstall()
    assert resource(bare_control_plane, namespace)["metadata"]["uid"] == uid
    for kind in ("deployment", "serviceaccount", "service", "clusterrole", "clusterrolebinding"):
        assert not bare_control_plane.exists(kind, "-n", NAMESPACE, "-l", "app.kubernetes.io/instance=megatron")
    release.install()
    with release.operator():
        until_served(bare_control_plane, namespace)
        removed = [installer.run(step.command) for step in removal]
    assert 'megatroninference.inference.megatron.dev "chat" deleted' in removed[0]
    assert not bare_control_plane.exists("crd", DEFINITION)


def test_a_definition_that_was_applied_manually_is_adopted_on_request(
    release: Release, bare_control_plane: Cluster
) -> None:
    by_hand = release.helm("template", "other", CHART, REGISTRY, "--show-only=templates/crd.yaml")
    bare_control_plane.kubectl("apply", "-f", "-", input=by_hand)
    with pytest.raises(CommandFailedError, match=f"{DEFINITION}.* exists and cannot be imported"):
        release.install()
    release.install("--take-ownership", "--force-conflicts")
    found = bare_control_plane.get("crd", DEFINITION)
    assert found["metadata"]["annotations"]["meta.helm.sh/release-name"] == "megatron"


@pytest.mark.usefixtures("namespace")
def test_helm_test_checks_that_the_operator_runs(
    release: Release, installer: DocShell, bare_control_plane: Cluster
) -> None:
    install, test = documented("docs/install.md", "helm install megatron")
    assert documented("docs/install.md", "docker buildx build") == [install]
    install_as_in_the_docs(installer, bare_control_plane, install)
    with release.operator() as operator:
        url = operator.url
        assert "Phase:          Succeeded" in release.test(url, lambda: installer.run(test.command))
    with pytest.raises(CommandFailedError, match=r"Phase: +Failed"):
        release.test(url)


def test_a_release_for_some_namespaces_serves_only_these(
    release: Release, bare_control_plane: Cluster, namespace: str
) -> None:
    second, foreign = bare_control_plane.make_namespace(), bare_control_plane.make_namespace()
    release.install(f"--set=namespaces={{{namespace},{second}}}")
    with release.operator() as operator:
        for each in (foreign, namespace, second):
            make(bare_control_plane, each)
        until_served(bare_control_plane, namespace)
        until_served(bare_control_plane, second)
        assert "status" not in resource(bare_control_plane, foreign)
    assert "forbidden" not in operator.log.read_text()
    kubeconfig = bare_control_plane.kubeconfig_for(NAME, NAMESPACE)
    for request in (("list", "pods"), ("get", "secrets"), ("get", "megatroninferences")):
        with pytest.raises(CommandFailedError, match="can-i"):
            bare_control_plane.kubectl("auth", "can-i", *request, "-n", foreign, kubeconfig=kubeconfig)


def test_the_rules_of_the_definition_are_omitted_only_on_request(release: Release) -> None:
    def rules(*flags: str) -> int:
        text = release.helm("template", "any", CHART, REGISTRY, "--show-only=templates/crd.yaml", *flags)
        return text.count("x-kubernetes-validations")

    assert rules("--set=crds.rules=false") == rules("--set=crds.rules=false", "--kube-version=1.36") == 0
    in_file = (CHART / "files" / "crd.yaml").read_text().count("x-kubernetes-validations")
    assert rules() == rules("--kube-version=1.20") == in_file > 0


def test_a_release_has_rules_that_the_api_server_enforces(
    release: Release, bare_control_plane: Cluster, namespace: str
) -> None:
    release.install()
    with pytest.raises(CommandFailedError, match=r"spec\.pods\.ranksPerPod"):
        bare_control_plane.apply(namespace, manifest(pods={"device": "cpu", "ranksPerPod": 2}))


def test_a_release_without_rules_leaves_their_check_to_the_operator(
    release: Release, bare_control_plane: Cluster, namespace: str
) -> None:
    release.install("--set=crds.rules=false")
    bare_control_plane.apply(namespace, manifest(pods={"device": "cpu", "ranksPerPod": 2}))
    with release.operator():
        path = f"/apis/inference.megatron.dev/v1alpha1/namespaces/{namespace}/megatroninferences/chat"
        wait_until(lambda: "ranksPerPod" in str((bare_control_plane.read(path) or {}).get("status")), "the refusal")


@pytest.mark.usefixtures("release")
async def test_the_readme_installs_and_serves_a_model(
    installer: DocShell, bare_control_plane: Cluster, tmp_path: Path
) -> None:
    install, apply, get, patch, scale = documented("README.md", "helm install megatron")
    _, operator = documented("docs/command-line.md", "megatron-operator local")
    (resource,) = (block.text for block in doc_blocks("yaml") if block.page == "README.md")
    installer.write("my-model.yaml", resource)
    model = Resource(bare_control_plane, "default", "smollm2")
    await asyncio.to_thread(install_as_in_the_docs, installer, bare_control_plane, install)
    await asyncio.to_thread(installer.run, apply.command)
    with installer.running(operator.command, tmp_path / "operator.log"):
        async with Api(bare_control_plane.kubeconfig) as api, ScriptedNode(api, "default"):
            await model.until(lambda status: status.get("ready") == "2/2", "both groups")
            assert_table(get.output, await asyncio.to_thread(installer.run, get.command))
            await asyncio.to_thread(installer.run, patch.command)
            await model.until_phase("Suspended")
            await asyncio.to_thread(installer.run, scale.command)
            await model.until_pods(*(f"smollm2-{group}-0-0" for group in range(3)))
            await model.kubectl("delete", "mi", "smollm2", "--timeout=50s")
            await model.until_gone("pods")


@pytest.mark.usefixtures("release")
def test_kubectl_installs_the_manifests_and_removes_the_activator(
    installer: DocShell, bare_control_plane: Cluster
) -> None:
    (apply,) = documented("docs/install.md", "kubectl apply -k manifests")
    removal = documented("docs/install.md", "kubectl delete deployment")
    (overlay,) = (block.text for block in doc_blocks("yaml") if "components: [../manifests/activator]" in block.text)
    installer.write("overlay/kustomization.yaml", overlay)
    if bare_control_plane.read("/apis/policy/v1") is None:  # as the page says for cores before 1.21
        activator = installer.own("manifests") / "activator/activator.yaml"
        activator.write_text(activator.read_text().replace("policy/v1", "policy/v1beta1"))
    flag = "--validate=false"  # as the page says for cores before 1.25
    installer.run(f"{apply.command} {flag}")
    assert bare_control_plane.exists("deployment", "megatron-operator", "-n", NAMESPACE)
    installer.run(f"kubectl apply -k overlay {flag}")
    installer.run(f"{apply.command} {flag}")
    removed = [line for step in removal for line in installer.run(step.command).splitlines()]
    assert len(removed) == 7
    assert all(' "megatron-activator" deleted' in line for line in removed)
    for kind in ("deployment", "clusterrole", "clusterrolebinding"):
        bare_control_plane.kubectl("delete", kind, "megatron-operator", "-n", NAMESPACE)

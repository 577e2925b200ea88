"""The rendered chart: valid for Kubernetes, according to its values, and the same operator as in manifests/."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chart_support.helm import CHART, NAMESPACE, REGISTRY, ROOT, Helm, Object, of_kind, only
from chart_support.values import MONITORED, VARIANTS
from cluster_support import binaries
from cluster_support.errors import CommandFailedError
from release_archives import package_chart
from suite_support import kubernetes_schemas, yaml_documents
from suite_support.doc_blocks import doc_blocks

from megatron_operator.settings import IMAGE_VARIABLE, NetworkPolicies

LABELS_OF_RELEASES = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")


def kustomize(folder: Path) -> list[Object]:
    command = [binaries.find_kubectl(os.environ), "kustomize", folder]
    return list(yaml_documents.load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@pytest.fixture(scope="session")
def kustomized() -> list[Object]:
    """The objects of `kubectl apply -k manifests`."""
    return kustomize(ROOT / "manifests")


@pytest.fixture(scope="session")
def with_activator(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The objects of the overlay in the docs that adds the activator."""
    documented = [each for block in doc_blocks("yaml") for each in yaml_documents.load_all(block.text)]
    (overlay,) = (each for each in documented if "components" in each)
    folder = tmp_path_factory.mktemp("activator")
    shutil.copytree(ROOT / "manifests", folder / "manifests")
    (folder / "overlay").mkdir()
    (folder / "overlay" / "kustomization.yaml").write_text(json.dumps(overlay))
    return kustomize(folder / "overlay")


def check(objects: list[Object]) -> None:
    """Raises if an object of a built-in kind is invalid in a supported version of Kubernetes."""
    for each in objects:
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # see test_chart_monitoring.py
        kubernetes_schemas.check(each)


def as_in_manifests(value: Any) -> Any:
    """An object of the release `megatron-inference` with the names of manifests/, without fields that only releases
    have."""
    if isinstance(value, dict):
        return {
            key: as_in_manifests(each)
            for key, each in value.items()
            if key not in LABELS_OF_RELEASES and not key.startswith("helm.sh/")
        }
    if isinstance(value, list):
        return [as_in_manifests(each) for each in value]
    if isinstance(value, str):
        named = re.sub(r"(^|\)/)megatron-inference(?=$|-)", r"\1megatron-operator", value)
        return named.replace("megatron-operator-activator", "megatron-activator")
    return value


def installations() -> list[list[str]]:
    """The commands in the docs that install the chart."""
    found = [words for block in doc_blocks("console", "bash") for words in block.commands]
    return [words for words in found if words[:2] == ["helm", "install"]]


def test_helm_lint_finds_no_problems(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_helm_reads_the_package_of_a_release(helm: Helm, tmp_path: Path) -> None:
    package = package_chart(CHART, tmp_path, "0.1.0", 1_700_000_000)
    assert helm.template(chart=package) == helm.template()


@pytest.mark.parametrize(
    "command", [each for each in installations() if not each[3].startswith("oci://")], ids=shlex.join
)
def test_an_installation_in_the_docs_renders(helm: Helm, command: list[str]) -> None:
    flags = [word for word in command[4:] if word not in ("--wait", "--create-namespace")]
    check([each for each in yaml_documents.load_all(helm("template", command[2], ROOT / command[3], *flags)) if each])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_objects_are_valid_for_all_values(helm: Helm, variant: str) -> None:
    check(helm.template(*VARIANTS[variant]))


def images(objects: list[Object]) -> tuple[str, str]:
    """The image of the operator, and the default image of models."""
    (container,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    return container["image"], variables[IMAGE_VARIABLE]


def test_a_release_without_a_path_of_the_images_is_refused_with_the_remedy(helm: Helm) -> None:
    with pytest.raises(CommandFailedError, match=r"registry: is empty; set it to the path .* localhost/megatron-infer"):
        helm("template", "megatron", CHART)
    with pytest.raises(CommandFailedError, match="'/registry'"):
        helm("template", "megatron", CHART, "--set=registry=https://registry.example.com")


def test_one_path_names_all_images(helm: Helm) -> None:
    registry = "registry.example.com:5000/team"
    expected = (f"{registry}/operator:0.1.0", f"{registry}/runtime:0.1.0-{{device}}")
    assert images(helm.template(f"--set=registry={registry}/")) == expected


def test_images_can_be_named_one_by_one(helm: Helm) -> None:
    given = {"registry": "", "image.repository": "a.example.com/operator", "runtime.image": "b.example.com/runtime:2"}
    rendered = images(helm.template(*(f"--set={name}={value}" for name, value in given.items())))
    assert rendered == ("a.example.com/operator:0.1.0", "b.example.com/runtime:2")


def paths(values: Object, above: str = "") -> Iterator[str]:
    """The path of every value of the chart."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from paths(value, f"{above}{name}.")


@pytest.mark.parametrize("path", list(paths(yaml_documents.load((CHART / "values.yaml").read_text()))))
def test_a_value_that_is_null_gives_valid_objects_or_is_refused_by_its_name(helm: Helm, path: str) -> None:
    refusal = f"missing property '{path.rpartition('.')[2]}'"
    try:
        objects = helm.template(*MONITORED, "--set=podDisruptionBudget.enabled=true", f"--set={path}=null")
    except CommandFailedError as refused:
        if refusal not in str(refused):
            raise
    else:
        check(objects)


def test_labels_and_annotations_are_text_and_leave_the_selector_alone(helm: Helm) -> None:
    values = {
        "podLabels": {"number": 1234567, "app.kubernetes.io/name": "mine"},
        "podAnnotations": {"flag": True, "text": "true"},
        "nodeSelector": {"gpu": True},
        "serviceAccount": {"annotations": {"number": 1.5}},
        "metrics": {"labels": {"release": 1}, "dashboard": {"labels": {"board": 1}, "annotations": {"folder": 2}}},
    }
    objects = helm.template(*MONITORED, *(f"--set-json={name}={json.dumps(value)}" for name, value in values.items()))
    check(objects)
    deployment = only(objects, "Deployment")["spec"]
    labels, annotations = (deployment["template"]["metadata"][field] for field in ("labels", "annotations"))
    assert labels["number"] == "1234567"
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert (annotations["flag"], annotations["text"]) == ("true", "true")
    assert deployment["template"]["spec"]["nodeSelector"] == {"gpu": "true"}
    assert only(objects, "ServiceAccount")["metadata"]["annotations"] == {"number": "1.5"}
    assert only(objects, "ConfigMap")["metadata"]["annotations"] == {"folder": "2"}
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
        assert only(objects, kind)["metadata"]["labels"]["release"] == "1"


def test_the_clients_of_the_http_port_can_be_narrowed(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]
    (container,) = only(helm.template(f"--set-json=networkPolicy.clientsFrom={json.dumps(peers)}"), "Deployment")[
        "spec"
    ]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "namespace") for each in container["env"]}
    allowed = NetworkPolicies.from_environment(environment)
    assert allowed is not None
    assert list(allowed.clients_from) == peers


def test_the_objects_of_the_kustomizations_are_valid(kustomized: list[Object], with_activator: list[Object]) -> None:
    check(kustomized)
    check(with_activator)


def test_an_invalid_object_is_found(helm: Helm) -> None:
    deployment = only(helm.template(), "Deployment")
    deployment["spec"]["template"]["spec"]["serviceAcountName"] = "misspelt"
    with pytest.raises(jsonschema.ValidationError, match="serviceAcountName"):
        check([deployment])


@pytest.mark.parametrize(
    "kind",
    [
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    ],
)
def test_the_chart_and_the_manifests_are_the_same_operator(helm: Helm, kustomized: list[Object], kind: str) -> None:
    rendered = helm.template("--set=rbac.aggregate=false", "--no-hooks", release="megatron-inference")
    ours, theirs = as_in_manifests(only(rendered, kind)), only(kustomized, kind)
    ours["metadata"].pop("labels", None)
    theirs["metadata"].pop("labels", None)
    assert ours["metadata"].get("namespace") in (None, NAMESPACE)
    assert ours == theirs


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """The objects by kind and name, without labels of their own, and with variables in the order of their names."""
    for each in objects:
        each["metadata"].pop("labels", None)
        for container in each["spec"]["template"]["spec"]["containers"] if each["kind"] == "Deployment" else []:
            container.get("env", []).sort(key=lambda variable: str(variable["name"]))
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_the_chart_and_the_manifests_are_the_same_activator(helm: Helm, with_activator: list[Object]) -> None:
    values = ("--set=activator.enabled=true", "--set=activator.apiKeySecrets={chat-keys}")
    rendered = helm.template(*values, "--set=rbac.aggregate=false", "--no-hooks", release="megatron-inference")
    ours, theirs = by_name([as_in_manifests(each) for each in rendered]), by_name(deepcopy(with_activator))
    assert theirs.keys() - ours.keys() == {("Namespace", NAMESPACE)}
    named = {kind for kind, name in ours if name == "megatron-activator"}
    assert len(named) == 7
    assert named >= {"Deployment", "Service", "ClusterRole", "PodDisruptionBudget", "NetworkPolicy"}
    for each in ours:
        if each[0] != "CustomResourceDefinition":
            assert ours[each] == theirs[each]


def test_the_definition_of_the_chart_is_the_generated_one_and_is_kept(helm: Helm, kustomized: list[Object]) -> None:
    definition = only(helm.template(), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert definition["spec"] == only(kustomized, "CustomResourceDefinition")["spec"]


def test_a_second_release_leaves_the_definition_to_the_first(helm: Helm) -> None:
    assert of_kind(helm.template("--set=crds.install=false"), "CustomResourceDefinition") == []


def test_an_operator_of_some_namespaces_has_a_role_in_each_and_no_cluster_role(helm: Helm) -> None:
    everywhere = helm.template()
    confined = helm.template("--set=namespaces={alpha,beta}", "--set=rbac.aggregate=false")
    assert of_kind(confined, "ClusterRole") == of_kind(confined, "ClusterRoleBinding") == []
    roles = {role["metadata"]["namespace"]: role["rules"] for role in of_kind(confined, "Role")}
    assert roles.pop(NAMESPACE) == only(everywhere, "Role")["rules"]
    assert set(roles) == {"alpha", "beta"}
    whole = of_kind(everywhere, "ClusterRole")[0]["rules"]
    of_the_cluster = [rule for rule in whole if rule["resources"] in (["customresourcedefinitions"], ["nodes"])]
    assert roles["alpha"] == roles["beta"] == [rule for rule in whole if rule not in of_the_cluster]
    for binding in of_kind(confined, "RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == [NAMESPACE]
    args = only(confined, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [arg for arg in args if "namespace" in arg] == ["--namespace=alpha", "--namespace=beta"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--set=activator.replicas=0", "/activator/replicas"),
        ("--set=activator.apiKeySecrets={Users}", "/activator/apiKeySecrets/0"),
        ("--set=metrics.port=0", "/metrics/port"),
        ("--set=namespaces={Alpha}", "/namespaces/0"),
        ("--set=image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("--set=metrcs.port=1", "metrcs"),
        ("--set-json=networkPolicy.metricsFrom=[{}]", "/networkPolicy/metricsFrom/0"),
        ("--set=podDisruptionBudget.minAvailable=some", "/podDisruptionBudget/minAvailable"),
    ],
)
def test_a_value_that_is_wrong_is_named(helm: Helm, flag: str, message: str) -> None:
    with pytest.raises(CommandFailedError, match=message):
        helm.template(flag)


def test_the_schema_has_exactly_the_values_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml_documents.load((CHART / "values.yaml").read_text())
    schema["properties"].pop("global")  # a label of Helm
    assert paths_of_schema(schema) == paths_of_values(values, schema)


def paths_of_schema(schema: Object, path: str = "") -> set[str]:
    """The paths of all named values."""
    properties = schema.get("properties", {})
    return {path}.union(*(paths_of_schema(each, f"{path}.{name}") for name, each in properties.items()))


def paths_of_values(values: Any, schema: Object, path: str = "") -> set[str]:
    """The paths of all values, except below values that the schema does not restrict."""
    if not isinstance(values, dict) or "properties" not in schema:
        return {path}
    below = (
        paths_of_values(each, schema["properties"].get(name, {}), f"{path}.{name}") for name, each in values.items()
    )
    return {path}.union(*below)


def test_a_release_with_a_long_name_has_valid_object_names(helm: Helm) -> None:
    check(
        objects := helm.template(
            "--set=podDisruptionBudget.enabled=true", "--set=activator.enabled=true", release="r" * 53
        )
    )
    assert max(len(each["metadata"]["name"]) for each in objects if each["kind"] != "CustomResourceDefinition") <= 63


def test_the_notes_have_the_next_steps(helm: Helm) -> None:
    flags = ("--namespace", NAMESPACE, "--dry-run=client", REGISTRY, "--set=namespaces={alpha}")
    notes = helm("install", "megatron", CHART, *flags)
    assert "helm test megatron --namespace megatron-system" in notes
    assert "serves MegatronInference resources in the namespaces alpha." in notes
    assert '"podSelector":{"matchLabels":{"app.kubernetes.io/name":"prometheus"}}' in notes

"""The activator of a release: account, permissions, arguments, and several replicas."""

import json

import pytest
from chart_support.helm import NAMESPACE, Helm, of_kind, only
from chart_support.values import VARIANTS

from megatron_operator.commands.operator_rights import needed_by_activator
from megatron_operator.settings import Settings


def test_the_activator_has_its_own_account_and_reaches_restricted_models(helm: Helm) -> None:
    objects = helm.template(
        "--set=activator.enabled=true", '--set-json=networkPolicy.clientsFrom=[{"podSelector": {}}]'
    )
    operator, activator = of_kind(objects, "Deployment")
    if "activator" not in activator["metadata"]["name"]:
        operator, activator = activator, operator
    pod = activator["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == "megatron-megatron-inference-activator"
    limits = {"--max-body-bytes=16777216", "--max-total-body-bytes=268435456", "--max-address-share=0.5"}
    limits |= {"--max-connections=4096", "--head-timeout=10", "--body-timeout=60"}
    assert limits <= set(pod["spec"]["containers"][0]["args"])
    env = {each["name"]: each.get("value") for each in operator["spec"]["template"]["spec"]["containers"][0]["env"]}
    settings = Settings.from_environment(env | {"MEGATRON_OPERATOR_NAMESPACE": NAMESPACE})
    assert settings.has_activator
    assert settings.network_policies is not None
    everyone, peer = settings.network_policies.clients_from
    assert everyone == {"podSelector": {}}
    assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (operators,) = [
        each["spec"]["selector"] for each in of_kind(objects, "Service") if "metrics" in each["metadata"]["name"]
    ]
    assert not operators.items() <= pod["metadata"]["labels"].items()


def test_a_drain_moves_one_activator_after_the_other(helm: Helm) -> None:
    objects = helm.template("--set=activator.enabled=true")
    budget = only(objects, "PodDisruptionBudget")["spec"]
    (activator,) = (each for each in of_kind(objects, "Deployment") if "activator" in each["metadata"]["name"])
    pod = activator["spec"]["template"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert budget["maxUnavailable"] == 1
    for selector in (budget["selector"], spread["labelSelector"]):
        assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_the_endpoint_of_the_activator_is_configured(helm: Helm) -> None:
    objects = helm.template(*VARIANTS["activated in some namespaces"])
    (pod,) = (
        each["spec"]["template"] for each in of_kind(objects, "Deployment") if "activator" in str(each["metadata"])
    )
    args = pod["spec"]["containers"][0]["args"]
    assert {"--endpoint-namespace=alpha", "--selector=team in (a, b),tier", "--namespace=beta"} <= set(args)


def test_the_activator_has_the_rights_that_doctor_checks(helm: Helm) -> None:
    objects = helm.template("--set=activator.enabled=true", "--set=activator.apiKeySecrets={users}")
    (role,) = (each for each in of_kind(objects, "ClusterRole") if "activator" in each["metadata"]["name"])
    granted = {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }
    assert granted == {(each.group, each.resource, each.verb, each.name) for each in needed_by_activator("", ["users"])}


@pytest.mark.parametrize(
    ("names", "expected"), [([], None), (["users", "team.keys"], ["users", "team.keys"]), (["users", "*"], [])]
)
def test_the_activator_may_read_the_named_secrets_only(
    helm: Helm, names: list[str], expected: list[str] | None
) -> None:
    objects = helm.template("--set=activator.enabled=true", f"--set-json=activator.apiKeySecrets={json.dumps(names)}")
    roles = (each for each in of_kind(objects, "ClusterRole") if "activator" in each["metadata"]["name"])
    rules = [rule for role in roles for rule in role["rules"] if "secrets" in rule["resources"]]
    assert [(rule.get("resourceNames", []), rule["verbs"]) for rule in rules] == (
        [] if expected is None else [(expected, ["get"])]
    )

"""The settings from the operator's environment."""

from __future__ import annotations

import pytest

from megatron_operator.api.parse import parse_resource
from megatron_operator.api.v1alpha1 import API_VERSION, KIND, Device
from megatron_operator.render import image_of
from megatron_operator.settings import DEFAULT_IMAGE, NetworkPolicies, Settings

WISHED = {"MEGATRON_NETWORK_POLICIES": "true", "MEGATRON_OPERATOR_NAMESPACE": "system"}


def test_defaults_have_no_network_policy_and_the_image_of_this_version() -> None:
    assert Settings.from_environment({}) == Settings(DEFAULT_IMAGE, None)
    assert Settings.from_environment({**WISHED, "MEGATRON_NETWORK_POLICIES": "false"}).network_policies is None


def test_policies_allow_the_namespace_of_the_operator_and_the_scraper() -> None:
    told = {**WISHED, "MEGATRON_METRICS_FROM": '[{"podSelector": {}}]'}
    assert Settings.from_environment(WISHED).network_policies == NetworkPolicies("system")
    assert Settings.from_environment(told).network_policies == NetworkPolicies("system", ({"podSelector": {}},))


@pytest.mark.parametrize("device", Device)
def test_the_default_image_is_the_build_for_the_device_of_the_resource(device: Device) -> None:
    spec = {"model": {"source": {"path": "/model"}}, "pods": {"device": device.value}}
    resource = parse_resource({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "chat"}, "spec": spec})
    assert image_of(resource, Settings("registry/runtime:1-{device}")) == f"registry/runtime:1-{device.value}"
    assert image_of(resource, Settings("registry/runtime:1")) == "registry/runtime:1"
    assert DEFAULT_IMAGE.endswith("-{device}")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MEGATRON_NETWORK_POLICIES", "yes", "'yes' is neither; set it to true or false"),
        ("MEGATRON_OPERATOR_NAMESPACE", "", "is missing; set it to the namespace"),
        ("MEGATRON_METRICS_FROM", "prometheus", "'prometheus' is not such a list; set it to a JSON list of peers"),
        ("MEGATRON_FLEET_ROLLOUT_MAX_CONCURRENT", "many", "'many' is not a count; set it to a whole number like 1"),
        ("MEGATRON_ACTIVATOR", "1", "'1' is neither; set it to true or false"),
        ("MEGATRON_POD_DISRUPTION_BUDGETS", "no", "'no' is neither; set it to true or false"),
        ("MEGATRON_METRICS_FROM", "{}", "set it to a JSON list of peers"),
        # An empty peer would allow all connections.
        ("MEGATRON_METRICS_FROM", "[{}]", "set it to a JSON list of peers"),
    ],
)
def test_an_invalid_value_is_reported_with_its_variable_and_the_remedy(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=variable) as caught:
        Settings.from_environment({**WISHED, variable: value})
    assert message in str(caught.value)

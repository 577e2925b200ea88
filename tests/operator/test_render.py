"""The manifests of the children."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_support.resources import parsed
from suite_support.kubernetes_schemas import VERSIONS, check

from megatron_operator import names
from megatron_operator.api.parse import InvalidResource
from megatron_operator.names import PodIdentity
from megatron_operator.render import keys_secret, render_children, render_pod
from megatron_operator.settings import NetworkPolicies, Settings

LEADER = PodIdentity(group=0, attempt=2, index=0, leader=True, template_hash="abc", restarts=1)
WORKER = PodIdentity(group=1, attempt=0, index=0, leader=False, template_hash="abc", restarts=0)


def pod(identity: PodIdentity = LEADER, **spec: Any) -> dict[str, Any]:
    return render_pod(parsed(**spec), identity, Settings(image="runtime:1"))


def container(**spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = pod(**spec)["spec"]["containers"][0]
    return found


def env(manifest: dict[str, Any]) -> dict[str, Any]:
    entries = manifest["spec"]["containers"][0]["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_the_identity_of_a_pod_can_be_read_from_its_manifest() -> None:
    assert names.pod_identity(pod()["metadata"]) == LEADER


def test_a_pod_with_edited_labels_is_ignored() -> None:
    metadata = pod()["metadata"]
    metadata["labels"][names.GROUP_LABEL] = "first"
    assert names.pod_identity(metadata) is None


def test_a_pod_never_restarts_and_has_its_own_hostname() -> None:
    spec = pod()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert (spec["hostname"], spec["subdomain"]) == ("chat-0-2-0", "chat-pods")


def test_the_grace_period_is_longer_than_the_drain_timeout() -> None:
    assert pod(rollout={"drainTimeout": "90s"})["spec"]["terminationGracePeriodSeconds"] == 105


def test_a_pod_has_its_index_and_the_addresses_of_the_others() -> None:
    found = env(pod(WORKER))
    assert found["MEGATRON_REPLICA_GROUP"] == "1"
    assert found["MEGATRON_LEADER"] == "0"
    assert found["MEGATRON_COORDINATOR_ADDRESS"] == "tcp://chat-coordinator.models.svc:5557"
    assert found["MEGATRON_MASTER_ADDR"] == "chat-1-0-0.chat-pods.models.svc"
    assert found["MEGATRON_CONTROL_TOKEN"] == {"secretKeyRef": {"name": "chat-keys", "key": "control-token"}}


def test_a_pod_starts_in_the_desired_lifecycle() -> None:
    assert env(pod(lifecycle="Suspended"))["MEGATRON_LIFECYCLE"] == "Suspended"


def test_only_the_first_pod_of_a_group_has_http_and_coordinator_ports() -> None:
    for identity in (LEADER, WORKER):
        ports = {port["name"] for port in pod(identity)["spec"]["containers"][0]["ports"]}
        assert ports == {"control", "metrics", "rendezvous", "http", "coordinator"}
    further = pod(replace(WORKER, index=1))["spec"]["containers"][0]["ports"]
    assert {port["name"] for port in further} == {"control", "metrics"}


def test_expert_parallel_ranks_beyond_the_tensor_parallel_ones_get_pods() -> None:
    spread = {"parallelism": {"tensor": 2, "pipeline": 2, "expert": 8}, "pods": {"device": "cuda", "ranksPerPod": 4}}
    spec = parsed(**spread).spec
    assert (spec.parallelism.ranks, spec.pods_per_group, spec.ranks_in_pod(3)) == (16, 4, 4)
    manifest = pod(replace(WORKER, index=3), **spread)
    assert "--expert-parallel=8" in manifest["spec"]["containers"][0]["args"]
    assert parsed(parallelism={"expert": 8}).spec.pods_per_group == 8


def test_the_rendezvous_of_a_group_is_its_first_pod() -> None:
    spread = {"parallelism": {"tensor": 2, "pipeline": 2, "expert": 2}, "pods": {"device": "cpu", "ranksPerPod": 2}}
    first, second = (pod(replace(WORKER, attempt=5, index=index), **spread) for index in (0, 1))
    for manifest in (first, second):
        assert env(manifest)["MEGATRON_MASTER_ADDR"] == "chat-1-5-0.chat-pods.models.svc"
        args = set(manifest["spec"]["containers"][0]["args"])
        assert {"--tensor-parallel=2", "--pipeline-parallel=2", "--expert-parallel=2", "--ranks-per-pod=2"} <= args
    assert [env(manifest)["MEGATRON_POD_INDEX"] for manifest in (first, second)] == ["0", "1"]
    assert [manifest["spec"]["hostname"] for manifest in (first, second)] == ["chat-1-5-0", "chat-1-5-1"]
    ports = [{port["name"] for port in each["spec"]["containers"][0]["ports"]} for each in (first, second)]
    assert ports == [{"control", "metrics", "http", "coordinator", "rendezvous"}, {"control", "metrics"}]


def test_ranks_wait_for_unscheduled_pods_of_their_group() -> None:
    assert "--rendezvous-timeout=604800" in container(failurePolicy={"startupTimeout": "90s"})["args"]


def test_groups_prefer_different_nodes() -> None:
    (desired,) = pod()["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = desired["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == {names.NAME_LABEL: "chat"}
    assert term["labelSelector"]["matchExpressions"] == [
        {"key": names.GROUP_LABEL, "operator": "NotIn", "values": ["0"]}
    ]
    assert "topologySpreadConstraints" not in pod()["spec"]


def test_groups_are_spread_over_a_topology_and_each_stays_together_in_it() -> None:
    desired: dict[str, Any] = {
        "scheduling": {"topologyKey": "topology.kubernetes.io/zone"},
        "parallelism": {"tensor": 2},
    }
    first, second = pod(**desired), pod(replace(LEADER, index=1, leader=False, attempt=3), **desired)
    (spread,) = first["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "ScheduleAnyway")
    chosen = spread["labelSelector"]["matchLabels"]
    assert chosen.items() <= first["metadata"]["labels"].items()
    assert not chosen.items() <= second["metadata"]["labels"].items()
    assert "podAffinity" not in pod(scheduling=desired["scheduling"])["spec"]["affinity"]
    labels = pod(replace(LEADER, attempt=3), **desired)["metadata"]["labels"]
    for each in (first, second):
        (beside,) = each["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert beside["topologyKey"] == "topology.kubernetes.io/zone"
        attracting = beside["labelSelector"]["matchLabels"]
        assert attracting.items() <= each["metadata"]["labels"].items()
        assert (attracting.items() <= labels.items()) == (each is second)


RACK = "cloud.provider.com/topology-rack"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mode", ["Required", "Preferred"])
def test_the_pods_of_a_group_attract_each_other_into_a_domain(mode: str, index: int) -> None:
    scheduling = {"groupTopology": {"key": RACK, "mode": mode}}
    manifest = pod(replace(LEADER, index=index), scheduling=scheduling, parallelism={"tensor": 2})
    affinity = manifest["spec"]["affinity"]["podAffinity"]
    (kind,) = affinity
    assert kind == f"{mode.lower()}DuringSchedulingIgnoredDuringExecution"
    term = affinity[kind][0] if mode == "Required" else affinity[kind][0]["podAffinityTerm"]
    assert term["topologyKey"] == RACK
    assert term["labelSelector"]["matchLabels"].items() <= manifest["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("ranks", "sets"), [({"tensor": 4}, True), ({"tensor": 3}, True), ({"tensor": 5}, False), ({"tensor": 2}, None)]
)
def test_kueue_selects_the_domain_of_a_queued_group(ranks: dict[str, int], sets: bool | None) -> None:
    scheduling = {"queueName": "gpus", "groupTopology": {"key": RACK}}
    spec: dict[str, Any] = {"parallelism": ranks, "pods": {"device": "cpu", "ranksPerPod": 2}}
    manifest = pod(scheduling=scheduling, **spec)
    annotations = manifest["metadata"]["annotations"]
    assert annotations.get("kueue.x-k8s.io/podset-required-topology") == (None if sets is None else RACK)
    assert annotations.get("kueue.x-k8s.io/podset-group-name") == ("chat" if sets else None)
    assert "podAffinity" not in manifest["spec"]["affinity"]
    preferred = pod(scheduling={"queueName": "gpus", "groupTopology": {"key": RACK, "mode": "Preferred"}}, **spec)
    assert "kueue.x-k8s.io/podset-required-topology" not in preferred["metadata"]["annotations"]


def test_the_pods_of_an_attempt_are_queued_together() -> None:
    desired: dict[str, Any] = {"scheduling": {"queueName": "gpus"}, "parallelism": {"tensor": 2}}
    template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "mine"}}}
    for index in range(2):
        manifest = pod(replace(LEADER, index=index, leader=index == 0, attempt=3), podTemplate=template, **desired)
        metadata = manifest["metadata"]
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "chat-0-3"
        assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
        assert metadata["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"
    assert not any("kueue" in key for key in (*pod()["metadata"]["labels"], *pod()["metadata"]["annotations"]))


def test_the_launcher_gets_the_remaining_restart_budget() -> None:
    found = container(failurePolicy={"maxRestarts": 3, "resetAfter": "90m"})["args"]
    assert {"--max-restarts=2", "--restart-reset-after=5400"} <= set(found)


def test_a_model_on_a_claim_is_mounted_read_only() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "weights", "path": "/llama"}}
    manifest = pod(model={"source": claim})
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in manifest["spec"][
        "volumes"
    ]
    assert "--model=/models/llama" in manifest["spec"]["containers"][0]["args"]


def test_a_model_in_an_image_is_mounted_as_an_image_volume() -> None:
    manifest = pod(model={"source": {"image": {"reference": "registry/m:1", "path": "/llama", "pullPolicy": "Always"}}})
    image = {"reference": "registry/m:1", "pullPolicy": "Always"}
    assert {"name": "model", "image": image} in manifest["spec"]["volumes"]
    (container,) = manifest["spec"]["containers"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert "--model=/models/llama" in container["args"]
    check(manifest, VERSIONS[VERSIONS.index("1.31") :])  # the first with volumes of type image


def test_an_image_without_a_path_is_served_from_its_root() -> None:
    manifest = pod(model={"source": {"image": {"reference": "registry/m:1"}}})
    assert "--model=/models" in manifest["spec"]["containers"][0]["args"]
    volume = next(each for each in manifest["spec"]["volumes"] if each["name"] == "model")
    assert volume["image"]["pullPolicy"] == "IfNotPresent"


def test_a_pod_template_may_replace_the_image_volume() -> None:
    here = {"spec": {"volumes": [{"name": "model", "hostPath": {"path": "/srv/m"}}]}}
    manifest = pod(model={"source": {"image": {"reference": "registry/m:1"}}}, podTemplate=here)
    assert {"name": "model", "hostPath": {"path": "/srv/m"}} in manifest["spec"]["volumes"]


def test_a_model_from_the_hub_has_its_token() -> None:
    hub = {"repo": "a/b", "file": "c/d.gguf", "revision": "v1", "tokenSecret": {"name": "hf", "key": "token"}}
    manifest = pod(model={"source": {"huggingFace": hub}})
    args = manifest["spec"]["containers"][0]["args"]
    assert {"--hf-repo=a/b", "--hf-file=c/d.gguf", "--hf-revision=v1"} <= set(args)
    assert env(manifest)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


def test_api_keys_are_mounted_as_a_file_from_the_secret() -> None:
    manifest = pod(frontend={"apiKeysSecret": {"name": "keys"}})
    secret = {"secretName": "keys", "items": [{"key": "api-keys", "path": "api-keys"}]}
    assert {"name": "api-keys", "secret": secret} in manifest["spec"]["volumes"]
    mount = next(each for each in manifest["spec"]["containers"][0]["volumeMounts"] if each["name"] == "api-keys")
    assert env(manifest)["MEGATRON_API_KEYS_FILE"] == f"{mount['mountPath']}/api-keys"
    assert "subPath" not in mount, "a mount by subPath would not follow changes of the Secret"


def test_a_pod_meets_the_restricted_pod_security_standard() -> None:
    manifest = pod()
    assert manifest["spec"]["securityContext"]["runAsNonRoot"] is True
    assert manifest["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert manifest["spec"]["automountServiceAccountToken"] is False
    secure = manifest["spec"]["containers"][0]["securityContext"]
    assert secure["allowPrivilegeEscalation"] is False
    assert secure["readOnlyRootFilesystem"] is True
    assert secure["capabilities"] == {"drop": ["ALL"]}


def test_the_image_is_that_of_the_spec_or_the_operator() -> None:
    assert container()["image"] == "runtime:1"
    assert container(image="mine:2", imagePullPolicy="Never")["image"] == "mine:2"


def test_extra_flags_come_last() -> None:
    assert container(engine={"extraArgs": ["--threads-per-rank=1"]})["args"][-1] == "--threads-per-rank=1"


def test_the_pod_template_is_merged_by_name() -> None:
    template = {
        "metadata": {"labels": {"team": "a", names.GROUP_LABEL: "9"}, "annotations": {"note": "b"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "gpu"}],
            "containers": [
                {
                    "name": "megatron",
                    "resources": {"requests": {"cpu": "2"}},
                    "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "HF_HOME", "value": "/elsewhere"}],
                    "volumeMounts": [{"mountPath": "/cache", "name": "big"}],
                },
                {"name": "sidecar", "image": "s:1"},
            ],
            "volumes": [{"name": "big", "emptyDir": {}}, {"name": "tmp", "hostPath": {"path": "/scratch"}}],
            "securityContext": {"fsGroup": 7},
        },
    }
    manifest = pod(podTemplate=template)
    spec, main = manifest["spec"], manifest["spec"]["containers"][0]
    assert manifest["metadata"]["labels"]["team"] == "a"
    assert manifest["metadata"]["labels"][names.GROUP_LABEL] == "0"
    assert manifest["metadata"]["annotations"]["note"] == "b"
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["securityContext"]["fsGroup"] == 7
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert [each["name"] for each in spec["containers"]] == ["megatron", "sidecar"]
    assert main["command"] == ["megatron-serve"]
    assert main["resources"] == {"requests": {"cpu": "2", "memory": "2048Mi"}}
    assert env(manifest)["HF_HOME"] == "/elsewhere"
    assert env(manifest)["OMP_NUM_THREADS"] == "2"
    assert {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]}["/cache"] == "big"
    assert {"name": "tmp", "hostPath": {"path": "/scratch"}} in spec["volumes"]


def test_a_null_in_the_pod_template_removes_a_field() -> None:
    assert "securityContext" not in pod(podTemplate={"spec": {"securityContext": None}})["spec"]


def test_the_pod_template_can_not_change_fields_that_the_plan_needs() -> None:
    spec = pod(podTemplate={"spec": {"restartPolicy": "Always", "hostname": "x"}})["spec"]
    assert (spec["restartPolicy"], spec["hostname"]) == ("Never", "chat-0-2-0")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ({"containers": {}}, "spec.podTemplate.spec.containers"),
        ({"containers": [{"image": "x"}]}, "spec.podTemplate.spec.containers[0]"),
        ({"securityContext": 1}, "spec.podTemplate.spec.securityContext"),
    ],
)
def test_a_malformed_pod_template_is_rejected_by_field(override: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidResource) as caught:
        pod(podTemplate={"spec": override})
    assert [error.field for error in caught.value.errors] == [field]


def test_the_http_service_selects_first_pods_and_the_coordinator_service_the_leader() -> None:
    services = {manifest["metadata"]["name"]: manifest["spec"] for manifest in render_children(parsed(), Settings())}
    selected = {
        name: [
            service["selector"].items() <= pod(identity)["metadata"]["labels"].items()
            for identity in (LEADER, WORKER, replace(WORKER, index=1))
        ]
        for name, service in services.items()
    }
    assert selected["chat"] == [True, True, False]
    assert selected["chat-coordinator"] == [True, False, False]
    assert services["chat-coordinator"]["clusterIP"] == "None"
    assert services["chat-coordinator"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in services["chat"]
    assert services["chat-pods"]["selector"].items() <= pod(WORKER)["metadata"]["labels"].items()


def test_every_child_has_an_owner_reference() -> None:
    for manifest in [*render_children(parsed(), Settings()), keys_secret(parsed()).manifest, pod()]:
        owner = manifest["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("MegatronInference", "chat", "5f9c")


@pytest.mark.parametrize("spec", [{}, {"expose": {"service": {"type": "NodePort"}}}, {"parallelism": {"tensor": 2}}])
def test_every_manifest_matches_the_kubernetes_schema(spec: dict[str, Any]) -> None:
    settings = Settings(network_policies=NetworkPolicies("megatron-system", ({"podSelector": {}},)))
    for manifest in [*render_children(parsed(**spec), settings), keys_secret(parsed()).manifest, pod(WORKER, **spec)]:
        check(manifest)


def test_no_manifest_contains_a_secret_value() -> None:
    secret = keys_secret(parsed())
    assert not {"data", "stringData"} & secret.manifest.keys()
    assert secret.random_keys == ("coordinator-key", "control-token")

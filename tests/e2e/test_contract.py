"""The interface of the two packages: each parses the output of the other with its own parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from megatron_operator import names, replica_groups
from megatron_operator.activator.api_keys import digests_of, matches
from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import Device, KVCacheManagement, Lifecycle, Parser, Pooling, RoutingPolicy
from megatron_operator.api.v1alpha1.model import DType
from megatron_operator.failures import read_failure
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import BAD_INPUT_EXIT_CODE, RANK_PHASES, Signal
from megatron_operator.render import render_pod
from megatron_operator.settings import Settings
from megatron_runtime.cli import app
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.control_api import create_control_api
from megatron_runtime.launch.identity import Identity
from megatron_runtime.launch.options import (
    DEVICES,
    DTYPES,
    KV_CACHE_MANAGEMENTS,
    EngineOptions,
    LaunchOptions,
    ModelSource,
)
from megatron_runtime.launch.pod_state import PodFacts, PodState, RankPhase
from megatron_runtime.launch.routing_policy import ROUTING_POLICIES
from megatron_runtime.launch.tasks import first_rank, rendezvous_address
from megatron_runtime.launch.termination import Outcome
from megatron_runtime.lifecycle import SIGNALS
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT
from megatron_runtime.processes.supervisor import ChildEnd
from megatron_runtime.sampling_params import POOLINGS
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS, check_parsers

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "smollm2.yaml"
LEADER = PodIdentity(group=0, attempt=3, index=0, leader=True, template_hash="abc", restarts=2)
HOST = "127.0.0.1"
TOKEN = "control-token-of-the-test"
POOL = {"inferencePool": {"endpointPicker": {"name": "picker"}}}
KEYS = {"apiKeysSecret": {"name": "users"}}
WORKER = PodIdentity(group=1, attempt=0, index=0, leader=False, template_hash="abc", restarts=0)


def rendered(identity: PodIdentity = LEADER, **spec: Any) -> dict[str, Any]:
    """The container of a pod of the sample, with the fields of ``spec``."""
    obj = yaml.safe_load(SAMPLE.read_text())
    resource = parse_resource({**obj, "spec": {**obj["spec"], **spec}})
    container: dict[str, Any] = render_pod(resource, identity, Settings())["spec"]["containers"][0]
    return container


def flags_of(container: dict[str, Any]) -> dict[str, Any]:
    """The command line as the runtime's own parser reads it. Raises click's errors."""
    assert container["command"] == ["megatron-serve"]
    context = typer.main.get_command(app).make_context("megatron-serve", list(container["args"]))
    return dict(context.params)


def options_of(container: dict[str, Any]) -> LaunchOptions:
    """The runtime's options of one of several pods: its ranks and its identity."""
    flags = flags_of(container)
    sizes = {name: flags[name] for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")}
    return LaunchOptions(
        model=ModelSource(path=Path(__file__)),
        identity=Identity.from_environment(environment_of(container)),
        engine=EngineOptions(**sizes),
        ranks_per_pod=flags["ranks_per_pod"],
        rendezvous_timeout=flags["rendezvous_timeout"],
    )


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables as a kubelet sets them."""
    values = {"status.podIP": HOST, "coordinator-key": "k" * 43, "control-token": TOKEN, "token": "hf_secret"}

    def value(entry: dict[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        return values[source["fieldRef"]["fieldPath"] if "fieldRef" in source else source["secretKeyRef"]["key"]]

    return {entry["name"]: value(entry) for entry in container["env"]}


def test_the_runtime_parses_every_flag_of_the_sample() -> None:
    found = flags_of(rendered())
    expected = {
        "model": Path("/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "served_name": "smollm2",
        "dtype": "float32",
        "max_sequence_length": 2048,
        "tensor_parallel": 1,
        "ranks_per_pod": 1,
        "device": "cpu",
        "kv_cache_memory": "256Mi",
        "kv_cache_management": "offload",
        "prefix_caching": True,
        "chunked_prefill": True,
        "offload_weights": False,
        "routing_policy": "auto",
        "frontend_replicas": 2,
        "drain_timeout": 60.0,
        "max_restarts": 3,
        "restart_reset_after": 3600.0,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"model": {"source": {"huggingFace": {"repo": "a/b", "revision": "v1"}}}},
            {"hf_repo": "a/b", "hf_file": None, "hf_revision": "v1", "model": None, "max_sequence_length": None},
        ),
        (
            {"model": {"source": {"huggingFace": {"repo": "a/b", "file": "c.gguf"}}}},
            {"hf_repo": "a/b", "hf_file": "c.gguf", "hf_revision": "main"},
        ),
        (
            {"model": {"source": {"huggingFace": {"repo": "a/b", "file": "c.gguf"}}, "cache": {"claimName": "c"}}},
            {"hf_repo": None, "model": Path("/cached-model/c.gguf")},
        ),
        (
            {"model": {"source": {"persistentVolumeClaim": {"claimName": "c", "path": "/x"}}}},
            {"model": Path("/models/x")},
        ),
        ({"model": {"source": {"image": {"reference": "m:1", "path": "/x"}}}}, {"model": Path("/models/x")}),
        (
            {"engine": {"prefixCaching": False, "chunkedPrefill": False, "offloadWeights": True}},
            {"prefix_caching": False, "chunked_prefill": False, "offload_weights": True},
        ),
        (
            {"engine": {"kvCacheMemory": "1.5Gi", "blockSizeTokens": 32}},
            {"kv_cache_memory": "1.5Gi", "block_size_tokens": 32},
        ),
        (
            {"engine": {"mambaMemoryRatio": 0.25, "prefixCachingMambaGb": 1.5}},
            {"mamba_memory_ratio": 0.25, "prefix_caching_mamba_gb": 1.5},
        ),
        ({"engine": {"prefixCachingMambaGb": 0}}, {"mamba_memory_ratio": None, "prefix_caching_mamba_gb": 0.0}),
        (
            {"routing": {"policy": "LongestPrefix", "alpha": 0.25}},
            {"routing_policy": "longest-prefix", "routing_alpha": 0.25},
        ),
        ({"engine": {"speculation": {}}}, {"num_speculative_tokens": 7}),
        (
            {"engine": {"speculation": {"method": "PromptLookup", "numTokens": 3}}},
            {"num_speculative_tokens": 3},
        ),
        (
            {"engine": {"speculation": {"method": "DraftModel", "draftModel": "/models/draft.gguf", "numTokens": 4}}},
            {"num_speculative_tokens": 4, "speculative_draft_model": "/models/draft.gguf"},
        ),
        ({"engine": {"extraArgs": ["--threads-per-rank=2"]}}, {"threads_per_rank": 2}),
        ({"rollout": {"drainTimeout": "1500ms"}}, {"drain_timeout": 1.5}),
        ({"frontend": {"parsers": ["hermes", "qwen3"]}}, {"parsers": ["hermes", "qwen3"], "page": True}),
        ({"frontend": {"page": False}}, {"page": False, "generation_config": "auto"}),
        (
            {"frontend": {"generationConfig": "vllm", "trustRequestChatTemplate": True}},
            {"generation_config": "vllm", "trust_request_chat_template": True},
        ),
        (
            {"adapters": [{"name": f"a{number}", "path": f"/models/{number}"} for number in range(9)]},
            {"lora_modules": [f"a{number}=/models/{number}" for number in range(9)], "max_loras": 9},
        ),
        ({"frontend": {"pooling": "Mean", "mediaPlaceholder": True}}, {"pooling": "mean", "media_placeholder": True}),
        ({"expose": POOL, "frontend": KEYS}, {"picker_metrics_without_key": True}),
        ({"expose": POOL}, {"picker_metrics_without_key": False}),
        ({"frontend": KEYS}, {"picker_metrics_without_key": False}),
    ],
)
def test_the_runtime_parses_every_option_of_the_resource(spec: dict[str, Any], expected: dict[str, Any]) -> None:
    found = flags_of(rendered(**spec))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("tensor", "expert"), [(4, 2), (2, 4), (1, 4)])
def test_the_pods_of_a_replica_group_have_consistent_ranks(tensor: int, expert: int) -> None:
    sizes = {"tensor": tensor, "pipeline": 2, "expert": expert}
    spread: dict[str, Any] = {"parallelism": sizes, "pods": {"ranksPerPod": 3}}
    options = [options_of(rendered(replace(LEADER, index=index, leader=not index), **spread)) for index in range(3)]
    assert [(first_rank(each), each.local_ranks_per_replica_group) for each in options] == [(0, 3), (3, 3), (6, 2)]
    assert [each.spans_pods for each in options] == [True] * 3
    places = [rendezvous_address(each) for each in options]
    assert places == [(HOST, names.RENDEZVOUS_PORT), *[("smollm2-0-3-0.smollm2-pods.default.svc", 29500)] * 2]
    assert [port["containerPort"] for port in rendered()["ports"] if port["name"] == "rendezvous"] == [29500]
    for each in options:
        each.check()


def test_both_halves_distinguish_a_rank_that_lost_another() -> None:
    error = {"reason": "LostRankError", "message": "rank 5 is missing", "missing": [5]}
    outcome = Outcome.child_failed(ChildEnd("rank 4", 1, error=error), 4)
    failure = read_failure(outcome.exit_code, "Error", json.dumps(outcome.body()))
    assert (failure.reason, failure.rank) == (replica_groups.LOST_RANK, 5)
    assert set(replica_groups.RENDEZVOUS_DONE) < {each.value for each in RankPhase}


def test_the_runtime_accepts_every_choice_of_the_resource() -> None:
    assert {each.value for each in DType} <= set(DTYPES)
    assert {each.value for each in Device} <= set(DEVICES)
    managements = {
        flags_of(rendered(engine={"kvCacheManagement": each.value}))["kv_cache_management"]
        for each in KVCacheManagement
    }
    assert managements <= set(KV_CACHE_MANAGEMENTS)
    policies = {flags_of(rendered(routing={"policy": each.value}))["routing_policy"] for each in RoutingPolicy}
    assert policies <= set(ROUTING_POLICIES)
    assert {flags_of(rendered(frontend={"pooling": each.value}))["pooling"] for each in Pooling} == set(POOLINGS)
    assert [each.value for each in Parser] == list(dict.fromkeys([*TOOL_PARSERS, *REASONING_PARSERS]))


@pytest.mark.parametrize(
    ("parsers", "is_valid"),
    [
        (["openai", "openai_gptoss"], True),
        (["deepseek_v31", "deepseek_v3"], True),
        (["granite", "qwen3"], True),
        (["glm45"], True),
        (["glm45", "granite"], False),
        (["hermes", "openai"], False),
        (["qwen3", "openai_gptoss"], False),
    ],
)
def test_both_halves_agree_on_which_parsers_go_together(parsers: list[str], is_valid: bool) -> None:
    with nullcontext() if is_valid else pytest.raises(InvalidResource, match="same purpose"):
        rendered(frontend={"parsers": parsers})
    with nullcontext() if is_valid else pytest.raises(ConfigurationError, match="same purpose"):
        check_parsers(parsers)


def test_a_pod_parses_its_identity() -> None:
    leader = Identity.from_environment(environment_of(rendered(LEADER, lifecycle="Paused")))
    assert (leader.replica_group, leader.attempt, leader.pod_index, leader.is_leader) == (0, 3, 0, True)
    assert leader.lifecycle.value == "Paused"
    assert leader.coordinator_address == "tcp://smollm2-coordinator.default.svc:5557"
    assert leader.bind_host == HOST
    assert leader.control_token == TOKEN
    assert leader.termination_log == Path("/dev/termination-log")
    assert not leader.is_standalone
    worker = Identity.from_environment(environment_of(rendered(WORKER)))
    assert (worker.replica_group, worker.is_leader) == (1, False)


@pytest.mark.parametrize("lifecycle", [each for each in Lifecycle if each is not Lifecycle.STOPPED])
def test_a_pod_can_start_in_every_lifecycle_with_pods(lifecycle: Lifecycle) -> None:
    environment = environment_of(rendered(lifecycle=lifecycle.value))
    assert Identity.from_environment(environment).lifecycle.value == lifecycle.value


def test_the_file_with_api_keys_is_passed_to_the_runtime() -> None:
    container = rendered(frontend={"apiKeysSecret": {"name": "keys"}})
    assert Identity.from_environment(environment_of(container)).api_keys_file == Path("/etc/megatron/api-keys")


def test_both_halves_have_the_same_signals_phases_and_exit_codes() -> None:
    assert {each.value for each in Signal} == set(SIGNALS)
    assert {each.value for each in RankPhase} == set(RANK_PHASES)
    assert BAD_INPUT_EXIT_CODE == EXIT_BAD_INPUT


# --- the launcher's termination log


def check(container: dict[str, Any], folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs the rendered command with --check, in the rendered environment, as far as one machine permits."""
    log = folder / "termination-log"
    environment = {
        **os.environ,
        **environment_of(container),
        "MEGATRON_TERMINATION_LOG": str(log),
        "OMP_NUM_THREADS": "1",
    }
    # A standalone pod uses other ports when the default ones are in use.
    del environment["MEGATRON_COORDINATOR_ADDRESS"]
    command = [sys.executable, "-m", "megatron_runtime.cli", *container["args"], "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done, log


@pytest.mark.model
def test_the_rendered_sample_would_be_served(smollm2_path: Path, tmp_path: Path) -> None:
    source = {"source": {"path": str(smollm2_path)}, "servedName": "smollm2", "maxSequenceLength": 2048}
    done, _ = check(rendered(model=source), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_model_is_bad_input_to_both_halves(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.gguf"
    done, log = check(rendered(model={"source": {"path": str(missing)}}), tmp_path)
    assert done.returncode == BAD_INPUT_EXIT_CODE
    failure = read_failure(done.returncode, "Error", log.read_text())
    assert failure.bad_input
    assert failure.reason == "InvalidSpec"
    assert str(missing) in failure.message


def test_the_probes_use_paths_of_the_control_api() -> None:
    container = rendered()
    api = create_control_api(PodState(PodFacts(is_leader=True)), lambda: None, token=None, metrics=lambda: b"")
    paths = {getattr(route, "path", "") for route in api.routes}
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["path"] for probe in probes} <= paths
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {ports[probe["port"]] for probe in probes} == {names.CONTROL_PORT}


@pytest.mark.parametrize(
    "authorization", ["", "Bearer one", "bearer  two", "Basic one", "Bearer", "Bearer # three", "one"]
)
@pytest.mark.parametrize("key", ["", "one", " two ", "three", "# three"])
def test_activator_and_server_accept_the_same_api_keys(authorization: str, key: str, tmp_path: Path) -> None:
    text = "one\n\n  two\t\n# three\n"
    (tmp_path / "keys").write_text(text)
    try:
        ApiKeys(tmp_path / "keys").check(authorization or None, key or None)
    except ApiError:
        is_accepted = False
    else:
        is_accepted = True
    assert matches(digests_of(text), authorization, key) is is_accepted

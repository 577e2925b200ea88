"""The launcher's checks before it starts processes, and the sizes that it chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.small_facts import BYTES_PER_TOKEN, PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.identity import Identity, Lifecycle
from megatron_runtime.launch.memory import AvailableMemory, available_memory, usable_cores
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import RANK_OVERHEAD, element_bytes, plan_engine
from megatron_runtime.launch.quantity import format_bytes, parse_bytes
from megatron_runtime.launch.tasks import (
    compute_environment,
    first_rank,
    rank_task,
    rendezvous_address,
    threads_per_rank,
)
from megatron_runtime.model.formats.quantized_weights import KeptWeights


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    """Valid options; the dtype does not depend on the machine."""
    return LaunchOptions(model=ModelSource(path=tmp_path), engine=EngineOptions(dtype="float32"))


def with_engine(options: LaunchOptions, **changes: Any) -> LaunchOptions:
    """The options with other engine settings."""
    return replace(options, engine=replace(options.engine, **changes))


def refusal(options: LaunchOptions) -> str | None:
    """The error message of invalid options, or None."""
    try:
        options.check()
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replica_groups": 0}, "--replica-groups 0: must be at least 1"),
        ({"routing_alpha": 1.5}, "--routing-alpha 1.5: must be between 0 and 1"),
        (
            {"routing_policy": "longest-prefix", "engine": EngineOptions(prefix_caching=False)},
            "--routing-policy longest-prefix: routes by cached prefixes, but --no-prefix-caching",
        ),
        ({"routing_policy": "random"}, "--routing-policy random: use one of round-robin, load-balanced"),
        ({"port": 70000}, "--port 70000: must be between 0"),
        ({"engine": EngineOptions(dtype="int8")}, "--dtype int8: use one of auto, float32"),
        (
            {"engine": EngineOptions(logprobs_mode="cooked")},
            "--logprobs-mode cooked: use one of raw_logprobs, processed",
        ),
        (
            {"engine": EngineOptions(quantized_weights="int8")},
            "--quantized-weights int8: use one of expand, keep",
        ),
        (
            {"engine": EngineOptions(quantized_weights="keep", dtype="float16")},
            "--quantized-weights keep: a CPU computes with quantized weights in bfloat16 or float32, but the dtype is",
        ),
        ({"engine": EngineOptions(device="tpu")}, "--device tpu: use one of cpu, cuda"),
        ({"engine": EngineOptions(block_size_tokens=0)}, "--block-size-tokens 0: must be at least 1"),
        ({"model": ModelSource()}, "give exactly one of --model PATH and --hf-repo"),
        ({"model": ModelSource(Path("m"), hf_file="a.gguf")}, "--hf-file a.gguf: only allowed together with --hf-repo"),
        ({"model": ModelSource(hf_repo="a/b", hf_file="a.bin")}, "--hf-file a.bin: not a .gguf file; omit the flag"),
        ({"model": ModelSource(path=Path("/nowhere"))}, "--model /nowhere: no such file or folder"),
        ({"identity": Identity(bind_host="10.0.0.1")}, "MEGATRON_CONTROL_TOKEN is not set"),
        ({"identity": Identity(is_leader=False)}, "MEGATRON_LEADER=0: set MEGATRON_COORDINATOR_ADDRESS"),
        (
            {"identity": Identity(bind_host="10.0.0.1", control_token="t", coordinator_address="tcp://c:5557")},
            "MEGATRON_COORDINATOR_KEY is not set",
        ),
        (
            {"identity": Identity(coordinator_address="tcp://c:1"), "replica_groups": 2},
            "--replica-groups 2: only for a standalone",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options: LaunchOptions, changes: dict[str, Any], words: str) -> None:
    assert (refusal(replace(options, **changes)) or "").startswith(words)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing_alpha": 0.0},
        {"routing_alpha": 1.0, "routing_policy": "longest-prefix"},
        {"port": 0, "control_port": 65535, "replica_groups": 2},
        {"identity": Identity(bind_host="10.0.0.1", control_token="t")},
    ],
)
def test_valid_options_pass(options: LaunchOptions, changes: dict[str, Any]) -> None:
    assert refusal(replace(options, **changes)) is None


@pytest.mark.parametrize(
    ("bound", "asked", "host"),
    [
        ("10.0.0.1", None, "0.0.0.0"),
        ("fd00::1", None, "::"),
        ("127.0.0.5", None, "127.0.0.5"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        (None, None, "127.0.0.1"),
    ],
)
def test_only_the_openai_endpoint_of_a_pod_listens_on_loopback_too(
    options: LaunchOptions, bound: str | None, asked: str | None, host: str
) -> None:
    pod = replace(options, host=asked, identity=Identity(bind_host=bound))
    assert (pod.http_host, pod.private_host) == (host, bound or "127.0.0.1")


def test_a_kv_cache_of_default_size_fits_beside_the_weights(options: LaunchOptions) -> None:
    assert plan_engine(options, SMALL_FACTS, PLENTY).kv_cache_bytes == 2**30
    little = AvailableMemory(RANK_OVERHEAD + 4000 + 64 * BYTES_PER_TOKEN, "left of the container's limit")
    plan = plan_engine(options, SMALL_FACTS, little)
    assert plan.kv_cache_bytes == 32 * BYTES_PER_TOKEN
    assert plan.max_sequence_length == 32


def test_replica_groups_on_one_machine_share_its_memory(options: LaunchOptions) -> None:
    asked = with_engine(options, kv_cache_bytes=2**20)
    one = AvailableMemory(RANK_OVERHEAD + 4000 + 2**20, "free on this machine")
    assert plan_engine(asked, SMALL_FACTS, one).kv_cache_bytes == 2**20
    with pytest.raises(ConfigurationError, match=r"--kv-cache-memory 1Mi: .* 2 rank\(s\) need .* fewer replica groups"):
        plan_engine(replace(asked, replica_groups=2), SMALL_FACTS, one)


def test_too_little_memory_for_the_weights_names_the_model(options: LaunchOptions) -> None:
    with pytest.raises(ConfigurationError, match=r"--model .*a rank needs .* for the weights"):
        plan_engine(options, SMALL_FACTS, AvailableMemory(2**20, "free on this machine"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_sequence_length": 513}, "--max-sequence-length 513: the model supports 512 tokens"),
        (
            {"kv_cache_bytes": 100},
            "--kv-cache-memory 100: too small for a single block of 16 tokens; give at least 16Ki",
        ),
        (
            {"kv_cache_bytes": 64 * BYTES_PER_TOKEN, "max_sequence_length": 100},
            "--max-sequence-length 100: a KV cache of 64Ki holds 64 tokens; use 64 or less",
        ),
    ],
)
def test_options_that_the_checkpoint_does_not_allow_are_refused(
    options: LaunchOptions, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan_engine(with_engine(options, **changes), SMALL_FACTS, PLENTY)
    assert str(caught.value).startswith(words)


def test_a_rank_needs_memory_only_for_its_part(options: LaunchOptions) -> None:
    cache = 64 * BYTES_PER_TOKEN // 4
    part = replace(SMALL_FACTS, cache_layout=replace(SMALL_FACTS.cache_layout, num_layers=2, heads=1))
    plan = plan_engine(with_engine(options, tensor_parallel=2, pipeline_parallel=2, kv_cache_bytes=cache), part, PLENTY)
    assert (plan.weight_bytes, plan.max_sequence_length) == (1000, 64)


def pod_of_three_ranks(options: LaunchOptions, index: int, **identity: Any) -> LaunchOptions:
    """One of the two pods of a replica group, as an operator starts it; the second pod has one rank."""
    place = {"bind_host": "127.0.0.1", "master_address": "first.pod", "coordinator_address": "tcp://c:1", **identity}
    who = Identity(replica_group=2, attempt=7, pod_index=index, is_leader=False, **place)
    return replace(with_engine(options, tensor_parallel=3), ranks_per_pod=2, identity=who)


def test_the_ranks_of_a_replica_group_are_numbered_across_its_pods(options: LaunchOptions) -> None:
    first, second = (pod_of_three_ranks(options, index) for index in (0, 1))
    assert (first_rank(first), first.local_ranks, first_rank(second), second.local_ranks) == (6, 2, 8, 1)
    assert refusal(first) is None
    assert refusal(second) is None
    words = refusal(pod_of_three_ranks(options, 2))
    assert words == "MEGATRON_POD_INDEX=2: the replica group's 3 rank(s) fit into fewer pods with --ranks-per-pod 2"


def test_the_rendezvous_of_a_replica_group_is_in_its_first_pod(options: LaunchOptions) -> None:
    assert rendezvous_address(pod_of_three_ranks(options, 0)) == ("127.0.0.1", 29500)
    assert rendezvous_address(pod_of_three_ranks(options, 1)) == ("first.pod", 29500)
    alone = rendezvous_address(with_engine(options, tensor_parallel=2))
    assert alone is not None
    assert alone[0] == "127.0.0.1"
    assert rendezvous_address(options) is None


@pytest.mark.parametrize(
    ("index", "identity", "words"),
    [
        (1, {"master_address": None}, "but MEGATRON_MASTER_ADDR is not the address of the first of them; set it"),
        (0, {"bind_host": None}, "but MEGATRON_BIND_HOST is not the address of this pod for the others"),
        (0, {"bind_host": "0.0.0.0"}, "but MEGATRON_BIND_HOST=0.0.0.0 is not the address of this pod for the others"),
    ],
)
def test_a_missing_rendezvous_address_is_named(
    options: LaunchOptions, index: int, identity: dict[str, Any], words: str
) -> None:
    message = refusal(pod_of_three_ranks(options, index, **identity))
    assert message is not None
    assert message.startswith("--ranks-per-pod 2: the 3 ranks of a replica group are in several pods, ")
    assert words in message
    assert message.endswith("or use --ranks-per-pod 3")


def test_a_launcher_of_several_replica_groups_does_not_split_them_over_pods(options: LaunchOptions) -> None:
    alone = replace(with_engine(options, tensor_parallel=2), ranks_per_pod=1, replica_groups=2)
    words = refusal(alone)
    assert words is not None
    assert words.endswith("in several pods, each with one replica group; use --replica-groups 1, or --ranks-per-pod 2")


def test_a_pod_needs_memory_only_for_its_own_ranks(options: LaunchOptions) -> None:
    asked = with_engine(pod_of_three_ranks(options, 1), kv_cache_bytes=2**20, tensor_parallel=4)
    half, facts = (
        replace(asked, ranks_per_pod=2),
        replace(SMALL_FACTS, cache_layout=replace(SMALL_FACTS.cache_layout, heads=1)),
    )
    room = AvailableMemory(2 * (RANK_OVERHEAD + 1000 + 2**20), "left of the container's limit")
    assert plan_engine(half, facts, room).weight_bytes == 1000
    with pytest.raises(ConfigurationError, match=r"4 rank\(s\) need"):
        plan_engine(replace(half, ranks_per_pod=4, identity=Identity()), facts, room)


def test_the_smaller_memory_limit_applies(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_memory(meminfo, tmp_path) == AvailableMemory(4000 * 1024, "free on this machine")
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert available_memory(meminfo, tmp_path) == AvailableMemory(2200000, "left of the container's limit")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path).count == 4000 * 1024


def test_usable_cores_respect_the_quota(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1


def test_ranks_on_one_machine_share_its_cores(options: LaunchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert threads_per_rank(replace(options, threads_per_rank=7)) == 7
    assert threads_per_rank(replace(options, identity=Identity(local_ranks=10_000))) == 1
    task = rank_task(
        replace(options, threads_per_rank=3, identity=Identity(replica_group=4)),
        rank=4,
        key="secret",
    )
    assert task.environment["OMP_NUM_THREADS"] == "3"
    assert task.environment["GOMP_SPINCOUNT"] == "1000"
    assert task.environment["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:glibc.malloc.")
    assert task.options["replica_group"] == 4
    assert "secret" not in str(task.options)


def test_settings_of_the_user_for_threads_and_memory_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert compute_environment().keys().isdisjoint({"GOMP_SPINCOUNT", "GLIBC_TUNABLES"})


@pytest.mark.parametrize(("text", "count"), [("512Mi", 2**29), ("20Gi", 20 * 2**30), ("1.5k", 1500), ("100", 100)])
def test_amounts_of_memory_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text, "--kv-cache-memory") == count


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "0", "1 GB"])
def test_an_invalid_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-cache-memory .*not an amount of memory"):
        parse_bytes(text, "--kv-cache-memory")


def test_amounts_of_memory_are_formatted() -> None:
    assert [format_bytes(count) for count in (100, 1536, 2**30, 2**40)] == ["100", "1.5Ki", "1Gi", "1Ti"]


def test_the_environment_sets_the_identity_of_the_pod() -> None:
    environment = {
        "MEGATRON_REPLICA_GROUP": "2",
        "MEGATRON_LEADER": "0",
        "MEGATRON_LIFECYCLE": "Paused",
        "MEGATRON_COORDINATOR_ADDRESS": "tcp://c:5557",
        "MEGATRON_CONTROL_TOKEN": "",
    }
    identity = Identity.from_environment(environment)
    assert (identity.replica_group, identity.is_leader, identity.lifecycle) == (2, False, Lifecycle.PAUSED)
    assert identity.control_token is None
    assert not identity.is_standalone
    assert Identity.from_environment({}).is_standalone


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEGATRON_REPLICA_GROUP", "-1"),
        ("MEGATRON_LEADER", "yes"),
        ("MEGATRON_LIFECYCLE", "Stopped"),
        ("MEGATRON_COORDINATOR_KEY", "short"),
    ],
)
def test_an_invalid_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        Identity.from_environment({variable: value})


def test_a_head_tied_to_the_embedding_counts_twice_on_a_cpu(options: LaunchOptions) -> None:
    tied = replace(SMALL_FACTS, tied_head_parameters=100)
    assert plan_engine(options, tied, PLENTY).weight_bytes == 4 * 1100
    assert plan_engine(with_engine(options, device="cuda", dtype="auto"), tied, PLENTY).weight_bytes == 2 * 1000


def test_quantized_weights_count_their_bytes(options: LaunchOptions) -> None:
    kept = KeptWeights(parameters=700, num_bytes=400, expert_parameters=300, expert_bytes=160)
    facts = replace(SMALL_FACTS, expert_parameters=500, kept=kept)
    assert plan_engine(options, facts, PLENTY).weight_bytes == 4 * 300 + 400
    divided = with_engine(options, tensor_parallel=2, expert_parallel=4)
    assert plan_engine(divided, facts, PLENTY).weight_bytes == (4 * 100 + 240) // 2 + (4 * 200 + 160) // 4


@pytest.mark.parametrize(("native", "size"), [(True, 2), (False, 4)])
def test_the_automatic_dtype_depends_on_the_cpu(native: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_runtime.launch.preflight.has_bfloat16", lambda: native)
    assert element_bytes(EngineOptions(dtype="auto")) == size

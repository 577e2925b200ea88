"""Pods of the tests: real launchers as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_support.pod import PORTS, Pod
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell
from suite_support.worker import free_host

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import load_tokenizer
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.options import FrontendOptions, HttpOptions

TINY_FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi")

NO_COORDINATOR = "tcp://127.0.0.1:1"
StartPod = Callable[..., Pod]
MakeContext = Callable[..., FrontendContext]


@pytest.fixture
def start_pod(tmp_path: Path) -> Iterator[StartPod]:
    """Starts launchers that end with the test."""
    pods: list[Pod] = []

    def start(*flags: str, **options: Any) -> Pod:
        folder = tmp_path / str(len(pods))
        folder.mkdir()
        pods.append(Pod(folder, *flags, **options))
        return pods[-1]

    yield start
    for pod in pods:
        pod.end()


@pytest.fixture
def make_context(tiny_checkpoint: Path) -> Iterator[MakeContext]:
    """Creates what the app of a frontend gets, with these API keys; its coordinator does not answer."""
    clients: list[InferenceClient] = []

    def make(keys: Sequence[str], token_digest: str | None = None, **http: Any) -> FrontendContext:
        clients.append(client := InferenceClient(NO_COORDINATOR, key="k" * 40))
        options = FrontendOptions(
            coordinator_address=NO_COORDINATOR,
            tokenizer_path=str(tiny_checkpoint),
            served_name="chat",
            max_sequence_length=128,
            http=HttpOptions(**http),
        )
        admission = AdmissionController(client, replica_group_wait=1.0, retry_after=1, max_in_flight=8)
        tokenizer = load_tokenizer(tiny_checkpoint)
        return FrontendContext(options, client, tokenizer, admission, ApiKeys(None, keys), token_digest)

    yield make
    for client in clients:
        client.stop()


@pytest.fixture
def new_host() -> Callable[[], str]:
    """Returns an address for a pod that other pods need before it is started."""
    return partial(free_host, PORTS)


@pytest.fixture(scope="session")
def pod_type() -> type[Pod]:
    """For modules with their own pod."""
    return Pod


@pytest.fixture(scope="session")
def shared_pod(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """One pod per worker with SmolLM2, for all tests that depend on the text; they must restore its state.

    The command is that of the docs, with further flags: in bfloat16 several tokens sometimes have the same highest
    probability.
    """
    _, serve, _, _ = documented("docs/command-line.md", "megatron-serve model fetch")
    reader = DocShell(tmp_path_factory.mktemp("reader"))
    reader.keep_models(smollm2_path.parent)
    flags = ("--dtype", "float32", "--kv-cache-memory", "512Mi")
    places = {name: reader.environment[name] for name in ("HOME", "PATH")}
    pod = Pod(tmp_path_factory.mktemp("pod"), *flags, program=reader.words(serve.command), **places)
    try:
        yield pod.wait_ready()
    finally:
        pod.end()


@pytest.fixture(scope="module")
def tiny_pod(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """One pod with such a model for the tests of a module; it runs after each test."""
    pod = Pod(tmp_path_factory.mktemp("pod"), "--model", str(tiny_checkpoint), *TINY_FLAGS)
    try:
        yield pod.wait_ready()
    finally:
        pod.end()

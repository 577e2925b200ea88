"""The commands in the docs that publish a release, with a registry on this machine, and the installation from there."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chart_support.helm import CHART, Helm
from cluster_support.cluster import wait_until
from cluster_support.errors import ClusterSupportError
from cluster_support.processes import GuardedProcess
from cluster_support.progress import say_at_once
from image_archives import normalize_archive
from node_support.tools import NodeTools, find_or_fetch_registry
from release import write_checksums
from release_archives import package_chart
from release_images import IMAGES, REGISTRY
from suite_support.doc_blocks import ROOT, doc_blocks
from suite_support.worker import free_port

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DATE = 1_700_000_000
IN_DOCS = "registry.example.com"
NOT_RUN = ("make", "cp", "diff", "twine")
"""Programs of the other commands: those that build and compare, and twine, which is not installed."""


@pytest.fixture(scope="module")
def tools() -> NodeTools:
    try:
        return find_or_fetch_registry(os.environ, say_at_once)
    except ClusterSupportError as error:
        pytest.skip(f"there is no registry here: {error}")


@pytest.fixture(scope="module")
def registry(tools: NodeTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty registry without TLS."""
    folder, address = tmp_path_factory.mktemp("registry"), f"127.0.0.1:{free_port()}"
    storage = {"filesystem": {"rootdirectory": str(folder / "storage")}}
    config = {"version": "0.1", "log": {"level": "warn"}, "storage": storage, "http": {"addr": address}}
    (folder / "config.yml").write_text(json.dumps(config))
    command = [tools.program("docker-registry"), "serve", folder / "config.yml"]
    process = GuardedProcess(command, folder / "log", env={**tools.environment, "OTEL_TRACES_EXPORTER": "none"})
    try:
        wait_until(lambda: answers(address), f"the registry, log: {process.log}", 30)
        yield address
    finally:
        process.stop()


def answers(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return bool(opener.open(f"http://{address}/v2/", timeout=5).status == 200)
    except OSError:
        return False


def write_image(path: Path, name: str) -> dict[str, Any]:
    """An archive of a small image as in a release; returns the configuration of the image."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        files.addfile(tarfile.TarInfo(path.name))
    diff = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": [name], "Labels": {}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
        "history": [{"created_by": "COPY"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": [f"{diff}.tar"]}]
    with tarfile.open(path, "w") as archive:
        for file, content in (
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
            (f"{diff}.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    normalize_archive(path, DATE, "abc")
    with tarfile.open(path) as archive:
        (name,) = (each for each in archive.getnames() if each.endswith(".json") and each != "manifest.json")
        written = archive.extractfile(name)
        assert written is not None
        return dict(json.load(written))


def commands(registry: str) -> list[list[str]]:
    """Those of the page on releases, with this registry."""
    blocks = [block for block in doc_blocks("console") if block.page == "docs/releasing.md"]
    every = [words for block in blocks for words in block.commands if words[0] not in NOT_RUN]
    return [[word.replace(IN_DOCS, registry) for word in words] for words in every]


def run(words: Sequence[str], folder: Path, tools: NodeTools, helm: Helm) -> str:
    match words:
        case ["helm", "push", *rest]:
            return helm("push", folder / rest[0], *rest[1:], "--plain-http")
        case ["helm", "install", *rest]:
            return helm("template", *(word for word in rest if word != "--create-namespace"), "--plain-http")
        case ["skopeo", "copy", *rest]:
            command = ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", *rest]
        case _:
            command = list(words)
    done = subprocess.run(command, cwd=folder, env=tools.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_what_is_published_by_the_commands_of_the_docs_can_be_installed(
    registry: str, tools: NodeTools, helm: Helm, tmp_path: Path
) -> None:
    configs = {
        f"{image.name}:{image.tag(VERSION)}": write_image(
            tmp_path / image.archive(VERSION), f"{REGISTRY}/{image.name}:{image.tag(VERSION)}"
        )
        for image in IMAGES
    }
    package_chart(CHART, tmp_path, VERSION, DATE)
    write_checksums(tmp_path)
    *published, installation = commands(registry)
    assert installation[:2] == ["helm", "install"]
    for words in published:
        run(words, tmp_path, tools, helm)
    path = f"{registry}/megatron"
    for name, config in configs.items():
        inspect = ["skopeo", "inspect", "--config", "--raw", "--tls-verify=false", f"docker://{path}/{name}"]
        assert json.loads(run(inspect, tmp_path, tools, helm)) == config
    same = helm("template", "megatron", CHART, "--namespace", "megatron-system", f"--set=registry={path}")
    assert run(installation, tmp_path, tools, helm) == same

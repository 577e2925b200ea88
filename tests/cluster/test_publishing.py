"""The commands in the docs that publish a release or a model, with a registry on this machine."""

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
from node_support.requirements import why_no_namespaces
from node_support.tools import NodeTools, find_or_fetch, find_or_fetch_registry
from release import write_checksums
from release_archives import package_chart
from release_images import IMAGES, REGISTRY
from suite_support.console_runs import documented
from suite_support.doc_blocks import ROOT
from suite_support.doc_shell import DocShell
from suite_support.worker import free_port

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DATE = 1_700_000_000
IN_DOCS = "registry.example.com"
DOCKER = """#!/bin/sh
export LD_LIBRARY_PATH={libraries} HOME={folder} TMPDIR={folder} XDG_RUNTIME_DIR={folder} CONTAINERS_CONF=/dev/null
export CONTAINERS_REGISTRIES_CONF={folder}/registries.conf
verb=$1
shift
[ $verb = push ] && set -- --tls-verify=false "$@"
exec {buildah} --storage-driver=vfs --root={folder}/root --runroot={folder}/run $verb --signature-policy={policy} "$@"
"""
"""buildah, whose `build` and `push` take the flags of Docker's."""


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
    publication = documented("docs/releasing.md", "sha256sum --check")
    installation = documented("docs/releasing.md", "helm install megatron oci://")
    return [[word.replace(IN_DOCS, registry) for word in step.words] for step in (*publication, *installation)]


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


@pytest.fixture
def reader(tmp_path: Path) -> DocShell:
    """A reader of the docs with buildah for Docker."""
    if missing := why_no_namespaces():
        pytest.skip(missing)
    try:
        tools = find_or_fetch(os.environ, say_at_once)
    except ClusterSupportError as error:
        pytest.skip(f"there is no buildah here: {error}")
    docker, folder = tmp_path / "docker", tmp_path / "images"
    folder.mkdir()
    (folder / "registries.conf").write_text("unqualified-search-registries = []\n")
    libraries, policy = tools.environment["LD_LIBRARY_PATH"], tools.signature_policy
    buildah = tools.program("buildah")
    docker.write_text(DOCKER.format(libraries=libraries, folder=folder, buildah=buildah, policy=policy))
    docker.chmod(0o755)
    return DocShell(tmp_path / "reader", {"docker": docker})


def test_a_model_is_published_as_an_image_by_the_commands_of_the_docs(
    registry: str, tools: NodeTools, helm: Helm, reader: DocShell, tmp_path: Path
) -> None:
    reader.write("chat-checkpoint/config.json", "{}")
    for step in documented("docs/examples.md", "printf"):
        reader.run(step.command.replace(IN_DOCS, registry))
    image = tmp_path / "image"
    published = f"docker://{registry}/models/chat:1"
    run(["skopeo", "copy", "--src-tls-verify=false", published, f"dir:{image}"], tmp_path, tools, helm)
    (layer,) = json.loads((image / "manifest.json").read_text())["layers"]
    with tarfile.open(image / layer["digest"].removeprefix("sha256:")) as files:
        assert files.getnames() == ["config.json"]

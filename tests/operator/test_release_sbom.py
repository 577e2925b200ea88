"""The SBOM of an image, from its archive."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from suite_support.doc_blocks import ROOT

sys.path.append(str(ROOT / "tools"))

from release_archives import ReleaseError
from release_sbom import write_sbom_of_image

DATE = 1_700_000_000
LIBRARIES = "opt/megatron/lib/python3.11/site-packages"
PROJECT: dict[str, Any] = {
    "name": "megatron-inference",
    "version": "0.1.0",
    "license": "Apache-2.0",
    "optional-dependencies": {"runtime": ["torch>=2.6"], "tracing": [], "object-storage": []},
}
TORCH = """Name: torch
Version: 2.13.0
License-Expression: BSD-3-Clause
Requires-Dist: cuda-toolkit[nvrtc]==13.0.3; platform_system == "Linux"
Requires-Dist: tomli; python_version < "3.11"
"""
TOOLKIT = """Name: cuda-toolkit
Version: 13.0.3
Requires-Dist: nvidia-cuda-nvrtc==13.0.88.*; extra == 'nvrtc'
Requires-Dist: nvidia-npp; extra == 'npp'
"""
NVRTC = """Name: nvidia-cuda-nvrtc
Version: 13.0.88
License: NVIDIA Proprietary Software
Classifier: License :: Other/Proprietary License
"""
PIP = "Name: pip\nVersion: 25.0\n"


def tar(path: Path, files: Mapping[str, bytes]) -> bytes:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path.read_bytes()


def write_image(folder: Path, packages: Mapping[str, str], libraries: str = LIBRARIES) -> None:
    """An archive with a layer of a base image, one of the packages, and a configuration."""
    base = tar(folder / "layer", {"usr/local/lib/python3.11/site-packages/pip-25.0.dist-info/METADATA": PIP.encode()})
    files = {
        f"{libraries}/{name}-1.dist-info/METADATA": f"Metadata-Version: 2.4\n{text}" for name, text in packages.items()
    }
    installed = tar(folder / "layer", {f"{libraries}/torch/lib.so": b"\0", **{k: v.encode() for k, v in files.items()}})
    tar(folder / "runtime-0.1.0-cuda.tar", {"1.tar": base, "2.tar": installed, "manifest.json": b"[]"})
    (folder / "layer").unlink()


def test_it_has_the_packages_of_the_image_with_their_licenses(tmp_path: Path) -> None:
    write_image(tmp_path, {"torch": TORCH, "cuda_toolkit": TOOLKIT, "nvidia_cuda_nvrtc": NVRTC})
    write_sbom_of_image("runtime-cuda", PROJECT, tmp_path, DATE)
    text = (tmp_path / "megatron-inference-0.1.0-runtime-cuda.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    found = {each["name"]: each.get("licenses", []) for each in bom["components"]}
    assert found == {
        "torch": [{"expression": "BSD-3-Clause"}],
        "cuda-toolkit": [],
        "nvidia-cuda-nvrtc": [{"license": {"name": "NVIDIA Proprietary Software"}}],
    }
    needs = {each["ref"]: each.get("dependsOn", []) for each in bom["dependencies"]}
    assert needs["runtime-cuda"] == ["torch==2.13.0"]
    assert needs["torch==2.13.0"] == ["cuda-toolkit==13.0.3"]
    assert needs["cuda-toolkit==13.0.3"] == ["nvidia-cuda-nvrtc==13.0.88"]


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({"torch": TORCH, "cuda_toolkit": TOOLKIT}, "lacks the package nvidia-cuda-nvrtc"),
        ({"torch": "Name: torch\nVersion: 2\n", "pip": PIP}, "has packages that nothing requires: pip"),
        ({}, "has packages of 0 versions of Python"),
    ],
)
def test_an_image_that_differs_from_what_is_required_is_refused(
    tmp_path: Path, packages: dict[str, str], message: str
) -> None:
    write_image(tmp_path, packages)
    with pytest.raises(ReleaseError, match=rf"runtime-0\.1\.0-cuda\.tar: {message}"):
        write_sbom_of_image("runtime-cuda", PROJECT, tmp_path, DATE)


def test_requirements_are_those_of_the_image_s_python(tmp_path: Path) -> None:
    packages = {"torch": TORCH, "cuda_toolkit": TOOLKIT, "nvidia_cuda_nvrtc": NVRTC}
    write_image(tmp_path, packages, LIBRARIES.replace("3.11", "3.10"))
    with pytest.raises(ReleaseError, match="lacks the package tomli"):
        write_sbom_of_image("runtime-cuda", PROJECT, tmp_path, DATE)

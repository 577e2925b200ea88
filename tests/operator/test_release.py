"""The files of a release: complete, installable, and the same bytes for the same sources."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from suite_support.doc_blocks import ROOT

sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "cluster")]

from node_support import images as buildah_images
from release_archives import ReleaseError, package_chart
from release_images import IMAGES, REGISTRY, buildx_command
from release_sbom import CONTENTS

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SOURCES = ("operator", "runtime", "charts", "tools", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
DATE = 1_700_000_000


def build(folder: Path, umask: int) -> Path:
    """A release without images from a copy of the sources, whose files have other times and modes."""
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in (*SOURCES, "CHANGELOG.md"):
        source = ROOT / name
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target, ignore=leave_out) if source.is_dir() else shutil.copyfile(source, target)
    for path in folder.rglob("*.py"):
        os.utime(path, (time.time(), time.time() - umask))
    command = [sys.executable, "tools/release.py", "--images", "none"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(DATE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, umask=umask, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("release"), 0o022)


def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "elsewhere", 0o077)
    names = sorted(path.name for path in dist.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert [name for name in names if (dist / name).read_bytes() != (other / name).read_bytes()] == []


def test_the_checksums_are_those_of_all_other_files(dist: Path) -> None:
    lines = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}
    del found["SHA256SUMS"]
    assert {name: digest for digest, name in lines} == found
    assert len(found) == 5


def test_wheel_and_sdist_have_both_packages_and_no_test(dist: Path) -> None:
    wheel = set(zipfile.ZipFile(dist / f"megatron_inference-{VERSION}-py3-none-any.whl").namelist())
    assert {"megatron_operator/cli.py", "megatron_runtime/cli.py", "megatron_runtime/py.typed"} <= wheel
    with tarfile.open(dist / f"megatron_inference-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"operator/megatron_operator/cli.py", "pyproject.toml", "LICENSE", "constraints.txt"} <= names
    assert [name for name in wheel | names if "test_" in name or name.startswith("tests")] == []
    code = {name for name in wheel if ".dist-info/" not in name}
    assert code == {name.partition("/")[2] for name in names if name.startswith(("operator/", "runtime/"))}


def test_the_chart_is_complete(dist: Path) -> None:
    chart = ROOT / "charts/megatron-inference"
    with tarfile.open(dist / f"megatron-inference-{VERSION}.tgz") as package:
        names = package.getnames()
        about = package.extractfile(names[0])
        assert about is not None
        assert yaml.safe_load(about.read())["version"] == VERSION
    assert names[0] == "megatron-inference/Chart.yaml"
    assert set(names) == {f"megatron-inference/{p.relative_to(chart)}" for p in chart.rglob("*") if p.is_file()}


def test_a_chart_with_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"version is .* and the package has 9\.9\.9: set it"):
        package_chart(ROOT / "charts/megatron-inference", tmp_path, "9.9.9", DATE)


@pytest.mark.parametrize(("image", "has_torch"), [("operator", False), ("runtime-cpu", True)])
def test_the_bill_of_materials_has_the_packages_of_the_image(dist: Path, image: str, has_torch: bool) -> None:
    text = (dist / f"megatron-inference-{VERSION}-{image}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom: dict[str, Any] = json.loads(text)
    versions = {each["name"]: each["version"] for each in bom["components"]}
    assert ("torch" in versions) == has_torch
    assert "pydantic" in versions
    assert not versions.keys() & {"pytest", "mypy", "hatchling"}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: each for name, each in versions.items() if each.partition("+")[0] != pins.get(name, each)} == {}
    needs = {each["ref"]: each.get("dependsOn", []) for each in bom["dependencies"]}
    assert any(ref.startswith("pydantic==") for ref in needs[image])
    assert any(each.startswith("pydantic-core==") for each in needs[f"pydantic=={versions['pydantic']}"])


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.archive(VERSION))
def test_an_image_is_built_from_its_dockerfile_with_fixed_times(image: Any, tmp_path: Path) -> None:
    command = buildx_command(image, tmp_path, VERSION, "abc")
    arguments = {word.split("=")[1] for word in command if word.startswith("--build-arg=")}
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / image.dockerfile).read_text(), re.M))
    assert arguments <= declared
    assert f"--tag={REGISTRY}/{image.name}:{image.tag(VERSION)}" in command
    assert any("rewrite-timestamp=true" in word and image.archive(VERSION) in word for word in command)


def test_buildah_builds_the_same_images() -> None:
    built = {(each.archive, each.dockerfile, each.device) for each in buildah_images.RELEASED}
    default = "cpu"
    assert built == {
        (each.archive(VERSION), each.dockerfile, None if each.device == default else each.device) for each in IMAGES
    }
    assert f"ARG DEVICE={default}" in (ROOT / "runtime/Dockerfile").read_text()


def test_each_image_has_a_bill_of_materials_with_the_extras_that_are_installed() -> None:
    assert {each.archive(VERSION).replace(f"-{VERSION}", "") for each in IMAGES} == {f"{name}.tar" for name in CONTENTS}
    for image in buildah_images.RELEASED:
        assert CONTENTS[image.archive.removesuffix(".tar").replace(f"-{VERSION}", "")] == image.wheels_for

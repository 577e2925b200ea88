"""The software bills of materials of a release, in CycloneDX: the Python packages of each image, without its base.

Versions, licenses and dependencies are those of the packages in the archives of the images. In a release without images
they are those of the packages in this environment, which has the pinned versions, but not the packages of CUDA.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import IO, Any

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from release_archives import ReleaseError

RUNTIME = ("runtime", "tracing", "object-storage")
CONTENTS = {"operator": ("operator",), "runtime-cpu": RUNTIME, "runtime-cuda": RUNTIME}
"""The extras of the package that an image has, by image."""
WITHOUT_CUDA = ("operator", "runtime-cpu")
"""The images whose packages are in this environment too."""
UNNAMED = "Other/Proprietary License"
"""A classifier of licenses that names none."""
METADATA = re.compile(r"(?:\./)?opt/megatron/lib/python(3\.\d+)/site-packages/([^/]+\.dist-info)/METADATA")
"""In the folder of the runtime's libraries, see runtime/Dockerfile."""


def write_sboms(project: Mapping[str, Any], folder: Path, date: int) -> None:
    """Writes the SBOMs of the images without CUDA from the packages in this environment.

    Args:
        project: The table of pyproject.toml.
        folder: Gets the files.
        date: In seconds since 1970.
    """
    for image in WITHOUT_CUDA:
        _write(project, image, folder, date, _Packages(distribution, {}))


def write_sbom_of_image(image: str, project: Mapping[str, Any], folder: Path, date: int) -> None:
    """The same for one image of CONTENTS, from its archive in the folder. Raises ReleaseError."""
    name, *device = image.split("-")
    archive = folder / f"{'-'.join((name, project['version'], *device))}.tar"
    with tempfile.TemporaryDirectory() as unpacked:
        python = _unpack_metadata(archive, Path(unpacked))
        found = {_normalized(each.name): each for each in distributions(path=[unpacked])}
        bom = _write(project, image, folder, date, _Packages(_lookup(archive, found), python))
    if extra := found.keys() - {each.name for each in bom.components}:
        raise ReleaseError(f"{archive.name}: has packages that nothing requires: {', '.join(sorted(extra))}")


def _unpack_metadata(archive: Path, target: Path) -> dict[str, str]:
    """Writes the metadata of all packages of an image into a folder; returns the markers of its Python."""
    versions = set()
    with tarfile.open(archive) as image:
        for member in image:
            layer = image.extractfile(member) if member.isfile() else None
            for version, name, file in () if layer is None else _metadata(layer):
                versions.add(version)
                (target / name).mkdir(exist_ok=True)
                (target / name / "METADATA").write_bytes(file.read())
    if len(versions) != 1:
        raise ReleaseError(f"{archive.name}: has packages of {len(versions)} versions of Python, not of one")
    (version,) = versions
    return {"python_version": version, "python_full_version": f"{version}.0"}


def _metadata(layer: IO[bytes]) -> Iterator[tuple[str, str, IO[bytes]]]:
    """The version of Python, the folder and the metadata of each package in a layer; of none in other files."""
    if not tarfile.is_tarfile(layer):
        return
    layer.seek(0)
    with tarfile.open(fileobj=layer) as files:
        for file in files:
            match, content = METADATA.fullmatch(file.name), files.extractfile(file) if file.isfile() else None
            if match and content is not None:
                yield match[1], match[2], content


def _lookup(archive: Path, found: Mapping[str, Distribution]) -> Callable[[str], Distribution]:
    def look_up(name: str) -> Distribution:
        if (package := found.get(_normalized(name))) is None:
            raise ReleaseError(f"{archive.name}: lacks the package {name}")
        return package

    return look_up


@dataclass
class _Packages:
    """Where packages are found by name, and their components so far."""

    find: Callable[[str], Distribution]
    python: dict[str, str]
    """Markers that differ from those of this Python."""
    components: dict[str, Component] = field(default_factory=dict)


def _write(project: Mapping[str, Any], image: str, folder: Path, date: int, packages: _Packages) -> Bom:
    bom = _sbom(project, image, CONTENTS[image], date, packages)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    (folder / f"{project['name']}-{project['version']}-{image}.cdx.json").write_text(text + "\n")
    return bom


def _sbom(project: Mapping[str, Any], image: str, extras: Iterable[str], date: int, packages: _Packages) -> Bom:
    ours = Component(
        name=f"{project['name']}-{image}",
        version=project["version"],
        type=ComponentType.APPLICATION,
        licenses=[LicenseExpression(project["license"])],
        bom_ref=image,
    )
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{project['name']}/{image}/{project['version']}/{date}"),
        metadata=BomMetaData(component=ours, timestamp=datetime.fromtimestamp(date, UTC)),
    )
    asked = [Requirement(text) for extra in extras for text in project["optional-dependencies"][extra]]
    bom.register_dependency(ours, [_add(bom, each, packages) for each in asked])
    return bom


def _add(bom: Bom, requirement: Requirement, packages: _Packages) -> Component:
    """The component of a requirement; registers it and all that it needs."""
    found = packages.find(requirement.name)
    name = _normalized(found.name)
    components = packages.components
    # Extras may add to what an earlier requirement needed, so they are components of their own in this table only.
    key = f"{name}[{','.join(sorted(requirement.extras))}]"
    if key in components:
        return components[key]
    known = next((each for other, each in components.items() if other.startswith(f"{name}[")), None)
    components[key] = known or Component(
        name=name,
        version=found.version,
        purl=PackageURL("pypi", name=name, version=found.version),
        licenses=list(_licenses(found)),
        bom_ref=f"{name}=={found.version}",
    )
    bom.components.add(components[key])
    needed = [_add(bom, each, packages) for each in _requirements(found, requirement.extras, packages.python)]
    bom.register_dependency(components[key], needed)
    return components[key]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(found: Distribution, extras: Iterable[str], python: Mapping[str, str]) -> Iterator[Requirement]:
    """What a package needs on this platform, with these extras and markers of Python."""
    for text in sorted(found.requires or ()):
        requirement, marker = Requirement(text), Requirement(text).marker
        if marker is None or any(marker.evaluate({**python, "extra": each}) for each in ("", *extras)):
            yield requirement


def _licenses(found: Distribution) -> Iterator[LicenseExpression | DisjunctiveLicense]:
    """The license expression of the metadata, else the names of its classifiers, else its text of one line; a
    classifier that only says that it is another license comes last. Nothing for a package that names none."""
    about: Any = found.metadata
    if expression := about.get("License-Expression"):
        yield LicenseExpression(expression)
        return
    classifiers = [each.split(" :: ") for each in about.get_all("Classifier") or ()]
    named = {each[-1] for each in classifiers if each[0] == "License"}
    text = about.get("License") or ""
    texts = {text} if text and "\n" not in text else set()
    yield from (DisjunctiveLicense(name=each) for each in sorted(named - {UNNAMED} or texts or named))

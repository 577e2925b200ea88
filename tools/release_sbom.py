"""The software bills of materials of a release, in CycloneDX: the Python packages of each image, without its base.

Versions, licenses and dependencies are those of the packages in this environment, which has the pinned versions.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement

CONTENTS = {"operator": ("operator",), "runtime-cpu": ("runtime", "tracing", "object-storage")}
"""The extras of the package that an image has, by image."""


def write_sboms(project: Mapping[str, Any], folder: Path, date: int) -> None:
    """Writes an SBOM for each image. ``project`` is the table of pyproject.toml; ``date`` in seconds since 1970."""
    for image, extras in CONTENTS.items():
        bom = _sbom(project, image, extras, date)
        text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
        (folder / f"{project['name']}-{project['version']}-{image}.cdx.json").write_text(text + "\n")


def _sbom(project: Mapping[str, Any], image: str, extras: Iterable[str], date: int) -> Bom:
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
    components: dict[str, Component] = {}
    asked = [Requirement(text) for extra in extras for text in project["optional-dependencies"][extra]]
    bom.register_dependency(ours, [_add(bom, each, components) for each in asked])
    return bom


def _add(bom: Bom, requirement: Requirement, components: dict[str, Component]) -> Component:
    """The component of a requirement; registers it and all that it needs."""
    found = distribution(requirement.name)
    name = re.sub(r"[-_.]+", "-", found.name).lower()
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
    needed = [_add(bom, each, components) for each in _requirements(found, requirement.extras)]
    bom.register_dependency(components[key], needed)
    return components[key]


def _requirements(found: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """What a package needs on this platform, with these extras."""
    for text in sorted(found.requires or ()):
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


def _licenses(found: Distribution) -> Iterator[LicenseExpression | DisjunctiveLicense]:
    """The license expression of the metadata, else the names of its classifiers."""
    about: Any = found.metadata
    if expression := about.get("License-Expression"):
        yield LicenseExpression(expression)
        return
    classifiers = [each.split(" :: ") for each in about.get_all("Classifier") or ()]
    yield from (DisjunctiveLicense(name=each[-1]) for each in sorted(classifiers) if each[0] == "License")

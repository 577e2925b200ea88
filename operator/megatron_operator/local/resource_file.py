"""The file with the resource: read, and watched for edits."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import KIND, MegatronInference


@dataclass(frozen=True)
class ResourceDocument:
    """The contents of the file: one resource as written, and Secrets by name, in plain text."""

    obj: Mapping[str, Any]
    resource: MegatronInference
    secrets: Mapping[str, Mapping[str, str]]


class ResourceFile:
    """Reads the file, and detects completed edits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, ...] | None = None
        self._seen: tuple[int, ...] | None = None

    def read(self) -> ResourceDocument:
        """Raises InvalidResource with the file and line, or with field, value and fix."""
        self._read = self._seen = self._version()
        try:
            documents = [document for document in yaml.safe_load_all(self.path.read_text()) if document is not None]
        except OSError as error:
            raise InvalidResource.of("file", str(self.path), f"{error.strerror}; give a readable file") from error
        except UnicodeDecodeError as error:
            raise InvalidResource.of("file", str(self.path), "is not text; give a YAML file") from error
        except yaml.YAMLError as error:
            raise InvalidResource.of("file", str(self.path), _yaml_words(error)) from error
        return _document(self.path, documents)

    def has_changed(self) -> bool:
        """Whether the file differs from the last read, and has not changed since the previous call.

        Two calls are needed because an editor may still be writing. A missing file is unchanged: editors replace files.
        """
        now = self._version()
        settled = now is not None and now == self._seen
        self._seen = now
        return settled and now != self._read

    def _version(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def _document(path: Path, documents: list[Any]) -> ResourceDocument:
    secrets: dict[str, Mapping[str, str]] = {}
    resources = []
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "Secret":
            secrets.update(_secret(document))
        else:
            resources.append(document)
    if len(resources) != 1:
        found = f"has {len(resources)} resources; leave one {KIND} in it (besides Secrets)"
        raise InvalidResource.of("file", str(path), found)
    return ResourceDocument(resources[0], parse_resource(resources[0]), secrets)


def _secret(document: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    name = _object(document, "metadata").get("name")
    if not name:
        raise InvalidResource.of("Secret.metadata.name", name, "is missing; set it")
    values = {}
    for key, value in _object(document, "data").items():
        try:
            values[key] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, TypeError, ValueError):
            words = "is not base64; write it under stringData instead"
            raise InvalidResource.of(f"Secret.data.{key}", "(hidden)", words) from None
    for key, value in _object(document, "stringData").items():
        if not isinstance(value, str):
            raise InvalidResource.of(f"Secret.stringData.{key}", "(hidden)", "must be text; put it in quotes")
        values[key] = value
    return {str(name): values}


def _object(secret: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = secret.get(field) or {}
    if not isinstance(found, Mapping):
        raise InvalidResource.of(f"Secret.{field}", "(hidden)", "must be an object; correct it")
    return found


def _yaml_words(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"is not YAML: {problem}{where}; correct it"

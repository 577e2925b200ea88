"""Translates a Pod manifest to a command line on this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]
SecretReader = Callable[[str, str], Mapping[str, str]]
"""(namespace, Secret name) -> keys and plain values; raises KeyError."""

DEFAULT_GRACE_SECONDS = 30
CONTAINER = "spec.containers[0]"
"""Path of the only container in error messages."""
REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
FIELD_KEY = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class PodError(Exception):
    """The manifest cannot run as a process; ``str()`` names the field, the value and the fix."""


def needed(entry: Any, field: str, where: str) -> Any:
    """A required field of ``entry``, which was found at ``where``. Raises PodError."""
    if not isinstance(entry, Mapping):
        raise PodError(f"{where}: {entry!r} is not an object; write one that has the field {field}")
    if entry.get(field) in (None, ""):
        found = ", ".join(sorted(entry)) or "nothing"
        raise PodError(f"{where}.{field}: missing beside {found}; a pod needs it, add it")
    return entry[field]


def number(entry: Json, field: str, where: str, default: float | None = None) -> float:
    """A numeric field; required unless there is a ``default``. Raises PodError."""
    absent = default is not None and entry.get(field) is None
    value: Any = default if absent else needed(entry, field, where)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise PodError(f"{where}.{field}: {value!r} is not a number; write one") from None


@dataclass(frozen=True)
class PodMetadata:
    """The parts of a pod's metadata and spec that other objects refer to."""

    name: str
    namespace: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    hostname: str
    subdomain: str
    grace_seconds: int

    @classmethod
    def of(cls, manifest: Json, uid: str) -> PodMetadata:
        """Raises PodError when the manifest has no name or a restart policy other than Never."""
        metadata, spec = manifest.get("metadata", {}), manifest.get("spec", {})
        if not metadata.get("name"):
            raise PodError("metadata.name: missing; every pod needs a name")
        policy = spec.get("restartPolicy", "Always")
        if policy != "Never":
            raise PodError(f"spec.restartPolicy: {policy} is not possible for processes; write Never")
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace", "default"),
            uid=metadata.get("uid") or uid,
            labels=dict(metadata.get("labels") or {}),
            annotations=dict(metadata.get("annotations") or {}),
            hostname=spec.get("hostname") or metadata["name"],
            subdomain=spec.get("subdomain") or "",
            grace_seconds=int(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)),
        )


@dataclass(frozen=True)
class PathMap:
    """Container paths and their folders on this machine; the longest prefix wins."""

    pairs: tuple[tuple[str, Path], ...] = ()

    def plus(self, container_path: str, here: Path) -> PathMap:
        """The map with one more pair, which replaces an older one for the same path."""
        return PathMap(((container_path.rstrip("/") or "/", here), *self.pairs))

    def apply(self, text: str) -> str:
        """``text`` with a mapped path replaced: at its start, or after the ``=`` of a flag or of a name."""
        name, separator, value = text.partition("=")
        if separator and (name.startswith("-") or (value.startswith("/") and not name.startswith("/"))):
            return f"{name}={self.apply(value)}"
        for container_path, here in sorted(self.pairs, key=lambda pair: len(pair[0]), reverse=True):
            if text == container_path:
                return str(here)
            if text.startswith(f"{container_path.rstrip('/')}/"):
                return str(here / text[len(container_path) :].lstrip("/"))
        return text


@dataclass(frozen=True)
class Launch:
    """A container as a process: arguments, environment and working directory."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None


def main_container(manifest: Json) -> Json:
    """The only container. Raises PodError for features that processes do not have."""
    spec = manifest.get("spec", {})
    containers: list[Json] = list(spec.get("containers") or [])
    if not containers:
        raise PodError("spec.containers: empty; a pod needs one container")
    for field, many in (("spec.initContainers", spec.get("initContainers") or []), ("spec.containers", containers[1:])):
        if many:
            names = ", ".join(str(item.get("name")) for item in many)
            raise PodError(f"{field}: {names} cannot run as processes on this machine; leave them out here")
    if not containers[0].get("command"):
        raise PodError("spec.containers[0].command: missing; without an image the command must be written out")
    return containers[0]


def container_ports(container: Json) -> list[int]:
    """The container's ports."""
    return [port for port, _ in _ports(container)]


def named_ports(container: Json) -> dict[str, int]:
    """The container's named ports, by name."""
    return {name: port for port, name in _ports(container) if name is not None}


def _ports(container: Json) -> Iterator[tuple[int, str | None]]:
    for index, port in enumerate(container.get("ports") or []):
        yield int(number(port, "containerPort", f"{CONTAINER}.ports[{index}]")), port.get("name")


def numbered_port(container: Json, port: int | str) -> int:
    """A port by number or by name. Raises PodError for an unknown name."""
    if str(port).isdigit():
        return int(port)
    named = named_ports(container)
    if port not in named:
        raise PodError(f"port {port!r}: container {container.get('name')} has no port of that name")
    return named[port]


def volume_paths(manifest: Json, folder: Path, read_secret: SecretReader, given: PathMap) -> PathMap:
    """``given`` plus the container's mounts: emptyDir and secret volumes below ``folder``, hostPath volumes in place.

    Raises PodError for other volumes, unless ``given`` maps their mount path.
    """
    namespace = manifest["metadata"].get("namespace", "default")
    volumes: dict[str, tuple[Json, str]] = {}
    for index, volume in enumerate(manifest["spec"].get("volumes") or []):
        where = f"spec.volumes[{index}]"
        volumes[needed(volume, "name", where)] = volume, where
    paths = given
    for index, mount in enumerate(main_container(manifest).get("volumeMounts") or []):
        at = f"{CONTAINER}.volumeMounts[{index}]"
        mount_path, name = str(needed(mount, "mountPath", at)), needed(mount, "name", at)
        volume, where = volumes.get(name, ({}, ""))
        if given.apply(mount_path) != mount_path or ("emptyDir" in volume and Path(mount_path).is_dir()):
            continue  # mapped by the user, or a folder that every machine has, like /tmp
        paths = paths.plus(mount_path, _volume_here(volume, where, mount, folder, namespace, read_secret))
    return paths


def _volume_here(
    volume: Json, where: str, mount: Json, folder: Path, namespace: str, read_secret: SecretReader
) -> Path:
    below = str(mount.get("subPath") or "")
    here = folder / "volumes" / str(volume.get("name"))
    if "emptyDir" in volume:
        (here / below).mkdir(parents=True, exist_ok=True)
        return here / below
    if "hostPath" in volume:
        return Path(needed(volume["hostPath"], "path", f"{where}.hostPath")) / below
    if "secret" in volume:
        _write_secret(here, volume["secret"], f"{where}.secret", namespace, read_secret)
        return here / below
    path = mount["mountPath"]
    kind = ", ".join(sorted(set(volume) - {"name"})) or "nothing"
    raise PodError(
        f"volume {mount['name']!r} ({kind}) at {path}: exists only on a cluster; map it with --map-path {path}=FOLDER"
    )


def _write_secret(here: Path, secret: Json, where: str, namespace: str, read_secret: SecretReader) -> None:
    name = needed(secret, "secretName", where)
    items = secret.get("items") or [{"key": key, "path": key} for key in _secret(read_secret, namespace, name)]
    here.mkdir(parents=True, exist_ok=True, mode=0o700)
    for index, item in enumerate(items):
        key, path = (needed(item, field, f"{where}.items[{index}]") for field in ("key", "path"))
        target = here / path
        target.touch(mode=0o600)
        target.write_text(_secret_value(read_secret, namespace, name, key))


def _secret(read_secret: SecretReader, namespace: str, name: str) -> Mapping[str, str]:
    try:
        return read_secret(namespace, name)
    except KeyError:
        raise PodError(f"Secret {name!r} does not exist here: create it, or name one that exists") from None


def _secret_value(read_secret: SecretReader, namespace: str, name: str, key: str) -> str:
    values = _secret(read_secret, namespace, name)
    if key not in values:
        raise PodError(f"Secret {name!r} has no key {key!r}; it has: {', '.join(sorted(values)) or 'none'}")
    return values[key]


def field_value(path: str, pod: PodMetadata, address: str) -> str:
    """The value of a downward API ``fieldPath``. Raises PodError for one that processes do not have."""
    if match := FIELD_KEY.fullmatch(path):
        return (pod.labels if match[1] == "labels" else pod.annotations).get(match[2], "")
    known = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "spec.nodeName": "localhost",
        "spec.serviceAccountName": "default",
        "status.hostIP": "127.0.0.1",
        "status.podIP": address,
        "status.podIPs": address,
    }
    if path not in known:
        raise PodError(f"fieldRef {path!r} has no value for a process; known: {', '.join(sorted(known))}")
    return known[path]


def environment(container: Json, pod: PodMetadata, address: str, read_secret: SecretReader) -> dict[str, str]:
    """The container's variables with references resolved in order, as the kubelet does. Raises PodError."""
    values = _from_secrets(container, pod, read_secret)
    for index, variable in enumerate(container.get("env") or []):
        name = needed(variable, "name", f"{CONTAINER}.env[{index}]")
        source, where = variable.get("valueFrom") or {}, f"env {name}: valueFrom"
        if not source:
            values[name] = expand(str(variable.get("value", "")), values)
        elif "fieldRef" in source:
            values[name] = field_value(needed(source["fieldRef"], "fieldPath", f"{where}.fieldRef"), pod, address)
        elif "secretKeyRef" in source:
            ref = source["secretKeyRef"]
            secret, key = (needed(ref, field, f"{where}.secretKeyRef") for field in ("name", "key"))
            try:
                values[name] = _secret_value(read_secret, pod.namespace, secret, key)
            except PodError:
                if not ref.get("optional"):
                    raise
        else:
            raise PodError(f"{where} {', '.join(source)} is not possible for processes; write a value")
    return values


def _from_secrets(container: Json, pod: PodMetadata, read_secret: SecretReader) -> dict[str, str]:
    """The variables of ``envFrom``, which may only name Secrets. Raises PodError."""
    values: dict[str, str] = {}
    for index, source in enumerate(container.get("envFrom") or []):
        where = f"{CONTAINER}.envFrom[{index}]"
        if "secretRef" not in source:
            raise PodError(f"{where}: {', '.join(source)} is not possible for processes; list the variables under env")
        name = needed(source["secretRef"], "name", f"{where}.secretRef")
        try:
            found = _secret(read_secret, pod.namespace, name)
        except PodError:
            if source["secretRef"].get("optional"):
                continue
            raise
        values |= {f"{source.get('prefix', '')}{key}": value for key, value in found.items()}
    return values


def expand(text: str, values: Mapping[str, str]) -> str:
    """Kubernetes' ``$(NAME)``: an unknown name stays as written, ``$$`` is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else values.get(name, match[0])

    return REFERENCE.sub(replace, text)


def read_launch(
    manifest: Json,
    pod: PodMetadata,
    address: str,
    *,
    base_env: Mapping[str, str],
    paths: PathMap,
    read_secret: SecretReader,
    resolve_hosts: Callable[[str], str],
) -> Launch:
    """The process for the manifest's container. ``resolve_hosts`` replaces the cluster's names in a text. Raises
    PodError."""

    def here(text: str) -> str:
        return resolve_hosts(paths.apply(text))

    container = main_container(manifest)
    own = environment(container, pod, address, read_secret)
    words: Iterable[str] = [*container["command"], *(container.get("args") or [])]
    argv = [here(expand(str(word), own)) for word in words]
    env = {**base_env, **{name: here(value) for name, value in own.items()}}
    program = shutil.which(argv[0], path=env.get("PATH"))
    if program is None:
        raise PodError(
            f"{argv[0]}: no such program on this machine; pip install 'megatron-inference[runtime]' provides it"
        )
    folder = container.get("workingDir")
    return Launch((program, *argv[1:]), env, Path(paths.apply(folder)) if folder else None)

"""Merges ``spec.podTemplate`` over a rendered pod, like Kubernetes' strategic merge patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.api.parse import InvalidResource

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists that are merged item by item, with the field that identifies an item."""

ADDED = ("tolerations", "envFrom")
"""Lists that are appended."""

UNIONS = (
    frozenset({"value", "valueFrom"}),
    frozenset(
        {"emptyDir", "hostPath", "persistentVolumeClaim", "image", "secret", "configMap", "projected", "csi", "nfs"}
    ),
    frozenset({"httpGet", "exec", "tcpSocket", "grpc"}),
)
"""Mutually exclusive fields: an override of one replaces the others."""


def merged(base: Mapping[str, Any], override: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``base`` with ``override`` applied; a null in the override removes the field. Raises InvalidResource."""
    replaced = {field for union in UNIONS if union & override.keys() for field in union - override.keys()}
    result = {field: value for field, value in base.items() if field not in replaced}
    for field, value in override.items():
        if value is None:
            result.pop(field, None)
        elif field in result:
            result[field] = _merged_value(field, result[field], value, f"{path}.{field}".lstrip("."))
        else:
            result[field] = value
    return result


def _merged_value(field: str, base: Any, override: Any, path: str) -> Any:
    if isinstance(base, Mapping):
        if not isinstance(override, Mapping):
            raise InvalidResource.of(path, override, "must be an object, as in a pod; correct it")
        return merged(base, override, path)
    if isinstance(base, list):
        if not isinstance(override, list):
            raise InvalidResource.of(path, override, "must be a list, as in a pod; correct it")
        return _merged_list(field, base, override, path)
    return override


def _merged_list(field: str, base: list[Any], override: list[Any], path: str) -> list[Any]:
    if field in ADDED:
        return [*base, *override]
    key = MERGE_KEYS.get(field)
    if key is None:
        return list(override)
    items = {item[key]: item for item in base}
    for position, item in enumerate(override):
        if not isinstance(item, Mapping) or key not in item:
            fix = f"needs the field {key}, which identifies the item; add it"
            raise InvalidResource.of(f"{path}[{position}]", item, fix)
        name = item[key]
        items[name] = merged(items[name], item, f"{path}[{position}]") if name in items else item
    return list(items.values())

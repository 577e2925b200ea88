"""Merges ``spec.podTemplate`` over a rendered pod, like Kubernetes' strategic merge patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "resourceClaims": "name",
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


def without(base: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """``base`` without the field at the dotted ``path``; None when it has no such field. Items of lists are addressed
    by the field that identifies them."""
    return _without(base, path.split("."))


def _without(base: Mapping[str, Any], steps: Sequence[str]) -> dict[str, Any] | None:
    field, rest = steps[0], steps[1:]
    if field not in base:
        return None
    if not rest:
        return {name: value for name, value in base.items() if name != field}
    below = base[field]
    if isinstance(below, list):
        below = _items_without(below, MERGE_KEYS.get(field, "name"), rest)
    else:
        below = _without(below, rest) if isinstance(below, Mapping) else None
    return None if below is None else {**base, field: below}


def _items_without(items: list[Any], key: str, steps: Sequence[str]) -> list[Any] | None:
    position = next((at for at, item in enumerate(items) if str(item.get(key)) == steps[0]), None)
    if position is None:
        return None
    if len(steps) == 1:
        return [*items[:position], *items[position + 1 :]]
    changed = _without(items[position], steps[1:])
    return None if changed is None else [*items[:position], changed, *items[position + 1 :]]


def dropped_fields(override: Mapping[str, Any], stored: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Paths and values of fields of ``override`` that an API server did not store, because it does not know them.

    Empty values are not reported, because API servers leave them out.
    """
    dropped: dict[str, Any] = {}
    for field, value in override.items():
        at = f"{path}.{field}"
        if not value:
            continue
        if field not in stored:
            dropped[at] = value
        elif isinstance(value, Mapping) and isinstance(stored[field], Mapping):
            dropped |= dropped_fields(value, stored[field], at)
        elif isinstance(value, list) and isinstance(stored[field], list):
            dropped |= _dropped_from_items(value, stored[field], MERGE_KEYS.get(field), at)
    return dropped


def _dropped_from_items(items: list[Any], stored: list[Any], key: str | None, path: str) -> dict[str, Any]:
    dropped: dict[str, Any] = {}
    for position, item in enumerate(items):
        if not isinstance(item, Mapping):
            continue
        candidates = [each for each in stored if isinstance(each, Mapping)]
        if key is not None:
            candidates = [each for each in candidates if each.get(key) == item.get(key)]
        missing = [dropped_fields(item, each, f"{path}[{position}]") for each in candidates]
        fewest: dict[str, Any] = min(missing, key=len, default={})
        dropped |= fewest
    return dropped

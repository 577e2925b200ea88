"""Specs that differ from a valid one in a single field: every field of the schema, with every kind of value."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from operator_support.resource import Json, manifest

Path = tuple[str | int, ...]
Schema = Mapping[str, Any]

OF_ANY_KIND = (None, "", "x", "1", "1s", 0, 1, -1, 1.0, 1.5, True, [], {})
LENGTHS = (40, 41, 63, 64, 253, 254, 256, 257, 317, 318, 1024, 1025)
TEXTS = (
    *("é", "a\n", "a b", "a.", "-a", "A.b", "a/b", "a/b/c", "a//b", "a_b/c", "a/é", "a/b\n", "x\u0000"),
    *("/", "/a\n", "/é", "/a b", "*", "*.a", "*.a.com", "nvidia.com/gpu", "/gpu", "a..b/c", "a:b@sha256:" + "0" * 64),
    *("0s", "1s", "1s\n", "1.s", "1h1", "-1s", "1us", "1.5h", "1m30s", "\uff11s", "1e3s", "9" * 20 + "h"),
    *("0", "00", "0Gi", "0.0Gi", "0.5", "1Gi", "1Gi\n", "-1Gi", "1.5Gi", ".5Gi", "1.Gi", "1e3", "1Ei", "1K", "1ki"),
    *(
        "s3://b/c",
        "s3://bucket/a/b.gguf",
        "gs://bucket",
        "s3://Bucket/a",
        "s3:///a",
        "s3://bucket/a b",
        "az://bucket/a",
    ),
    *("500m", "10.0.0.0/8", "10.0.0.256/8", "10.0.0.0/33", "10.0.0.0", "fd00::/8", "::/0", "1:/8", "90000h", "87600h"),
    *("\u0663Gi", "9" * 20, "9" * 20 + "Pi"),
)
MAPS = (
    {"a": "b"},
    {"nvidia.com/gpu": 1},
    {"a": "500m"},
    {"a": -1},
    {"a": "-1"},
    {"a": 1.5},
    {"a": 1},
    {"a": None},
    {"a": {}},
    {"": "x"},
    {"k" * 400: "v"},
)
POD_SPECS = ({"nodeSelector": {"x": True}}, {"containers": "x"}, {"a": None})
REQUIREMENT = {"key": "a", "operator": "In", "values": ["b"]}
NEEDED: Mapping[Path, Json] = {
    ("model",): {"source": {"path": "/m"}},
    ("model", "source"): {"path": "/m"},
    ("model", "source", "huggingFace"): {"repo": "a/b"},
    ("model", "source", "objectStorage"): {"uri": "s3://models/a"},
    ("model", "cache"): {"claimName": "c"},
    ("model", "cache", "volumeClaim"): {"size": "1Gi"},
    ("model", "cache", "hostPath"): {"path": "/m", "nodes": ["n"]},
    ("model", "source", "huggingFace", "tokenSecret"): {"name": "n", "key": "k"},
    ("model", "source", "persistentVolumeClaim"): {"claimName": "c"},
    ("model", "source", "image"): {"reference": "r"},
    ("adapters",): [{"name": "a", "path": "/a"}],
    ("adapters", 0): {"name": "a", "path": "/a"},
    ("frontend", "apiKeysSecret"): {"name": "n"},
    ("autoSuspend",): {"idleAfter": "1m"},
    ("expose", "httpRoute"): {"parentRefs": [{"name": "g"}]},
    ("expose", "httpRoute", "parentRefs", 0): {"name": "g"},
    ("expose", "inferencePool"): {"endpointPicker": {"name": "p"}},
    ("expose", "inferencePool", "endpointPicker"): {"name": "p"},
    ("expose", "clientsFrom"): [{"podSelector": {}}],
    ("expose", "clientsFrom", 0): {"podSelector": {}},
    ("expose", "clientsFrom", 0, "ipBlock"): {"cidr": "10.0.0.0/8"},
    ("expose", "clientsFrom", 0, "podSelector", "matchExpressions"): [REQUIREMENT],
    ("expose", "clientsFrom", 0, "podSelector", "matchExpressions", 0): REQUIREMENT,
    ("expose", "clientsFrom", 0, "namespaceSelector", "matchExpressions"): [REQUIREMENT],
    ("expose", "clientsFrom", 0, "namespaceSelector", "matchExpressions", 0): REQUIREMENT,
    ("scheduling", "groupTopology"): {"key": "a"},
    ("pods", "resourceClaims"): [{"name": "a", "resourceClaimName": "b"}],
    ("pods", "resourceClaims", 0): {"name": "a", "resourceClaimName": "b"},
    ("scheduling", "tolerations"): [{"key": "a", "effect": "NoExecute"}],
    ("scheduling", "tolerations", 0): {"key": "a", "effect": "NoExecute"},
}
"""The minimal valid value of a part."""


@dataclass(frozen=True)
class Trial:
    """``spec.path`` is ``value``; everything else is valid."""

    path: Path
    value: Any

    def __str__(self) -> str:
        return f"spec.{'.'.join(map(str, self.path))}: {self.value!r}"[:160]

    def resource(self) -> Json:
        """The whole resource."""
        made = manifest()
        if self.path[:2] == ("model", "cache"):
            made["spec"]["model"] = {"source": {"huggingFace": {"repo": "a/b"}}}
            if len(self.path) > 2:
                made["spec"]["model"]["cache"] = {}
            if self.path[2:4] == ("hostPath", "nodeSelector"):
                made["spec"]["model"]["cache"] = {"hostPath": {"path": "/m"}}
        if self.path[:2] == ("model", "source") and len(self.path) > 2:
            made["spec"]["model"]["source"] = {}
            if self.path[2] == "objectStorage":
                made["spec"]["model"]["cache"] = {"claimName": "c"}
        if self.path[1:] == ("gpuAllocation",):
            made["spec"]["pods"]["resourceClaims"] = [{"name": "a", "resourceClaimName": "b"}]
        if self.path[1:2] == ("resourceClaims",) and self.path[-1] == "resourceClaimTemplateName":
            made["spec"]["pods"]["resourceClaims"] = [{"name": "a"}]
        if "ipBlock" in self.path:
            made["spec"]["expose"] = {"clientsFrom": [{}]}  # It excludes a podSelector.
        _put(made["spec"], self.path, copy.deepcopy(self.value))
        return made


def trials(spec: Schema) -> Iterator[Trial]:
    """All trials of a spec with this schema."""
    for path, node in _fields(spec):
        for value in _values(node):
            yield Trial(path, value)
        if path in NEEDED:
            yield Trial(path, NEEDED[path])


def _fields(node: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    if path:
        yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _fields(child, (*path, name))
    if "items" in node:
        yield from _fields(node["items"], (*path, 0))


def _values(node: Schema) -> Iterator[Any]:
    yield from OF_ANY_KIND
    yield from node.get("enum", ())
    for each in node.get("enum", ())[:1]:
        yield from (each.upper(), each.lower(), f"{each} ")
    if node.get("type") in ("integer", "number") or "anyOf" in node:
        least, most = node.get("minimum", 0), node.get("maximum", 9)
        yield from (least, least - 1, most, most + 1, 2.0, 0.5, -0.1, 1.0001, 2**31, 2**53 + 1, 2**63, 1e300)
    if node.get("type") == "string" or "anyOf" in node:
        yield from TEXTS
        yield from ("a" * length for length in LENGTHS)
        yield from ("/" + "a" * (length - 1) for length in LENGTHS)
    if node.get("type") == "array":
        yield from (
            [value] * count
            for value in ("x", "hermes", "ReadWriteMany", {"name": "g"})
            for count in (1, 2, 16, 17, 32, 33, 64, 65)
        )
        yield from ([None], [""], [1], [[]])
    if "additionalProperties" in node:
        yield from MAPS
    if node.get("x-kubernetes-preserve-unknown-fields"):
        yield from POD_SPECS
    if "properties" in node:
        yield {"unknown": 1}


def _put(spec: Json, path: Path, value: Any) -> None:
    """Sets the field, with the required fields of its parents."""
    part: Any = spec
    for depth, step in enumerate(path[:-1], 1):
        if isinstance(step, str):
            part.setdefault(step, copy.deepcopy(NEEDED.get(path[:depth], [] if path[depth] == 0 else {})))
        part = part[step]
    if isinstance(path[-1], int):
        part[path[-1] :] = [value]
    else:
        part[path[-1]] = value

"""Which resource serves a model, or an adapter of one, of an endpoint for many models. Pure."""

from __future__ import annotations

import http
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.activator.api_keys import KeyRule, rule_of
from megatron_operator.activator.models import Availability, ModelKey, availability
from megatron_operator.activator.refusal import Refusal
from megatron_operator.timestamps import seconds

Object = Mapping[str, Any]
SHOWN_NAMES = 50
"""Names of models in an error message."""


@dataclass(frozen=True)
class ServedAdapter:
    """What an adapter of a resource has beside its name."""

    parent: str
    """Served name of the model."""
    root: str
    """Path of its folder in the container."""


@dataclass(frozen=True)
class ServedModel:
    """A model of an endpoint, or a LoRA adapter of ``spec.adapters`` that requests name as their model."""

    name: str
    """The value of ``model`` in requests."""
    key: ModelKey
    created: int
    """When the resource was created, in seconds since the epoch."""
    availability: Availability
    adapter: ServedAdapter | None = None
    """None for the model of the resource itself."""
    duplicates: tuple[str, ...] = ()
    """Names of younger resources that offer the same name, for which they get no requests of the endpoint."""
    keys: KeyRule | None = None
    """The API keys that it requires."""

    @property
    def description(self) -> dict[str, Any]:
        """The model in the format of OpenAI's API, with fields that it does not have: those of vLLM for adapters."""
        described = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "megatron",
            "resource": str(self.key),
            "availability": self.availability.value,
        }
        if self.adapter is not None:
            described |= {"root": self.adapter.root, "parent": self.adapter.parent}
        return {**described, "duplicates": list(self.duplicates)} if self.duplicates else described


def served_models(resources: Iterable[Object]) -> dict[str, ServedModel]:
    """The models of the resources and their adapters by their names in requests, in alphabetical order.

    The oldest of several resources that offer the same name serves it, as a model or as an adapter, so that a new
    resource never takes the requests of another one; of equally old ones the first by name.
    """
    found: dict[str, list[Object]] = {}
    for resource in resources:
        if not resource["metadata"].get("deletionTimestamp"):
            for name in (served_name(resource), *_adapters(resource)):
                found.setdefault(name, []).append(resource)
    return {name: _served(name, found[name]) for name in sorted(found)}


def served_name(resource: Object) -> str:
    """The model's name in the OpenAI API."""
    model = (resource.get("spec") or {}).get("model") or {}
    return str(model.get("servedName") or resource["metadata"]["name"])


def _adapters(resource: Object) -> dict[str, ServedAdapter]:
    """By name. One with the name of its model is left out: the runtime refuses to start with it."""
    parent = served_name(resource)
    given = (resource.get("spec") or {}).get("adapters") or ()
    return {each["name"]: ServedAdapter(parent, each["path"]) for each in given if each["name"] != parent}


def model_not_found(name: str, known: Iterable[str]) -> Refusal:
    """The answer for a model that no resource serves, with the known names."""
    words = f"model: {name!r} is not served here; {_listed(known)}"
    return Refusal(words, http.HTTPStatus.NOT_FOUND, code="model_not_found", param="model")


def model_missing(known: Iterable[str]) -> Refusal:
    """The answer for a body that names no model, with the known names."""
    words = f"model: is missing, or not a text; {_listed(known)}"
    return Refusal(words, http.HTTPStatus.BAD_REQUEST, code="model_missing", param="model")


def _served(name: str, resources: list[Object]) -> ServedModel:
    oldest, *others = sorted(resources, key=_age)
    metadata = oldest["metadata"]
    return ServedModel(
        name,
        ModelKey(metadata["namespace"], metadata["name"]),
        int(_created(oldest)),
        availability(oldest),
        _adapters(oldest).get(name),
        tuple(each["metadata"]["name"] for each in others),
        rule_of(oldest),
    )


def _age(resource: Object) -> tuple[float, str]:
    return _created(resource), resource["metadata"]["name"]


def _created(resource: Object) -> float:
    return seconds(resource["metadata"]["creationTimestamp"])


def _listed(known: Iterable[str]) -> str:
    names = sorted(known)
    if not names:
        return "this endpoint has no models"
    more = f" and {len(names) - SHOWN_NAMES} more, see /v1/models" if len(names) > SHOWN_NAMES else ""
    return f"the models are {', '.join(map(repr, names[:SHOWN_NAMES]))}{more}"

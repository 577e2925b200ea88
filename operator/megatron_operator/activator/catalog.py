"""The models of namespaces and their adapters, as lists of resources that are read from the API server."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_operator.activator.models import POLL
from megatron_operator.activator.served_models import ServedModel, model_not_found, served_models
from megatron_operator.activator.shared_calls import SharedCalls
from megatron_operator.idle_stop import LOOK_INTERVAL
from megatron_operator.observed_state import AdapterError

MOST_NAMESPACES = 1000
"""Namespaces whose lists are kept: clients may name any, also one that does not exist."""

Object = Mapping[str, Any]
ByName = Mapping[str, ServedModel]
logger = logging.getLogger("megatron_operator.activator")


class ResourceLists(Protocol):
    """The part of the API server's client that a catalog needs."""

    async def select(self, kind: str, namespace: str, selector: str) -> Sequence[Object]:
        """The objects that a label selector selects; an empty one selects all. Raises AdapterError."""
        ...


class Catalog:
    """Finds models by name. All requests for a namespace share a list, which is read every ``LOOK_INTERVAL`` seconds,
    and for a name that it does not have at most every ``POLL`` seconds."""

    def __init__(self, resources: ResourceLists, selector: str = "") -> None:
        """``selector``: label selector of the resources, in the notation of kubectl."""
        self._resources = resources
        self._selector = selector
        self._lists: dict[str, tuple[float, ByName]] = {}
        """The models of each namespace, and when they were read, in that order."""
        self._reads = SharedCalls[ByName]("list the models of")
        self._duplicates: dict[str, set[str]] = {}
        """Messages about duplicates that were logged, by namespace."""

    async def models(self, namespace: str, max_age: float | None = None) -> ByName:
        """The models of a namespace by name. Without an API server those that were read last. Raises AdapterError."""
        read_at, known = self._lists.get(namespace, (0.0, None))
        expires = read_at + (LOOK_INTERVAL if max_age is None else max_age)
        if known is not None and time.monotonic() < expires:
            return known
        try:
            return await self._reads.get(namespace, lambda: self._read(namespace))
        except AdapterError as error:
            if known is None:
                raise
            logger.warning("%s: the models that were read last stay known: %s", namespace, error)
            return known

    async def find(self, namespace: str, name: str, max_age: float | None = None) -> ServedModel:
        """The model with this name. Raises Refusal 404 with the known names, AdapterError."""
        if name not in (models := await self.models(namespace, max_age)):
            models = await self.models(namespace, max_age=POLL)
        if name not in models:
            raise model_not_found(name, models)
        return models[name]

    async def close(self) -> None:
        """Cancel open requests to the API server."""
        await self._reads.close()

    async def _read(self, namespace: str) -> ByName:
        read_at = time.monotonic()
        found = served_models(await self._resources.select("MegatronInference", namespace, self._selector))
        self._lists.pop(namespace, None)
        self._lists[namespace] = read_at, found
        if len(self._lists) > MOST_NAMESPACES:
            del self._lists[next(iter(self._lists))]
        self._report(namespace, found)
        return found

    def _report(self, namespace: str, models: ByName) -> None:
        """Log each duplicate once."""
        found = {
            f"{model.key}: serves {name!r}, and {', '.join(model.duplicates)} with the same name get no requests of the"
            " endpoint for it, because the oldest resource serves it; set another spec.model.servedName, or name in"
            " spec.adapters"
            for name, model in models.items()
            if model.duplicates
        }
        for words in sorted(found - self._duplicates.get(namespace, set())):
            logger.warning("%s", words)
        self._duplicates.pop(namespace, None)
        if found:
            self._duplicates[namespace] = found

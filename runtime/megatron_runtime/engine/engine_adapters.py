"""The LoRA adapters of one engine, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.errors import AdapterNotFoundError, CheckpointError, InvalidRequestError
from megatron_runtime.model.adapters import load_adapter
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.wire.items import AdapterEntry


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests can name."""

    name: str
    path: str
    slot: int
    digest: str
    """SHA-256 of its files, in hexadecimal."""
    generation: int | None
    """Of the service's adapter; None for one of this engine alone."""


class EngineAdapters:
    """Adapters by name: those of this engine alone, and those that a coordinator assigns.

    An adapter that is unloaded or replaced serves the requests that have begun with it, and then its memory is
    released. All ranks of a replica group make the same calls in the same order.

    Args:
        model: The decoder, or the part of it on this rank.
        device: The device that computes.
        config: ``max_loras`` and ``max_lora_rank``.
        slots_in_use: Returns the slots of the unfinished requests.
    """

    def __init__(
        self, model: Decoder, device: torch.device, config: InferenceConfig, slots_in_use: Callable[[], set[int]]
    ) -> None:
        self._model = model
        self._device = device
        self._limit = config.max_loras
        self._max_rank = config.max_lora_rank
        self._slots_in_use = slots_in_use
        self._loaded: dict[str, LoadedAdapter] = {}
        self._retired: set[int] = set()
        """Slots of adapters that only requests of before use."""

    @property
    def own(self) -> list[tuple[str, str]]:
        """Names and paths of the adapters of this engine alone."""
        return [(each.name, each.path) for each in self._loaded.values() if each.generation is None]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter with this name; None for None.

        Raises:
            AdapterNotFoundError: There is none.
        """
        if name is None:
            return None
        if name not in self._loaded:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise AdapterNotFoundError(f"adapter={name!r} is not loaded; loaded adapters: {known}", field="adapter")
        return self._loaded[name]

    def load(self, name: str, path: Path | str) -> None:
        """Load an adapter for this engine alone, or replace the one of this name; on an error nothing changes.

        Args:
            name: The ``adapter`` of requests for it.
            path: The folder that peft's ``save_pretrained`` has written.

        Raises:
            CheckpointError: It can't be read or does not fit, or there are ``max_loras`` adapters.
        """
        old = self._loaded.get(name)
        if old is not None and old.generation is not None:
            raise CheckpointError(f"adapter {name!r} was assigned by the coordinator; choose another name")
        self._require_room(len(self._loaded) + (old is None))
        fresh = self._read(name, str(path), None)
        if old is not None:
            self._retire(old)
        self._loaded[name] = fresh

    def unload(self, name: str) -> None:
        """Accept no more requests for an adapter of this engine alone.

        Raises:
            InvalidRequestError: There is none of this name.
        """
        found = self.find(name)
        if found is None or found.generation is not None:
            raise InvalidRequestError(
                f"adapter={name!r} was assigned by the coordinator; unload it there", field="adapter"
            )
        self._retire(self._loaded.pop(name))

    def assign(self, entries: Sequence[AdapterEntry]) -> None:
        """Have exactly these adapters of the service, beside the engine's own ones; on an error nothing changes.

        Raises:
            CheckpointError: One can't be read or does not fit, has the name of an own one, or they are too many.
        """
        names = {entry.name for entry in entries}
        kept = [each for each in self._loaded.values() if each.generation is None]
        for each in kept:
            if each.name in names:
                raise CheckpointError(f"adapter {each.name!r} is one of --lora-modules; choose another name")
        self._require_room(len(kept) + len(entries))
        present = {each.name: each for each in self._loaded.values() if each.generation is not None}
        missing = [e for e in entries if e.name not in present or present[e.name].generation != e.generation]
        fresh: list[LoadedAdapter] = []
        try:
            for entry in missing:
                fresh.append(self._read(*entry))  # noqa: PERF401 - those before an error are freed
        except BaseException:
            for each in fresh:
                self._model.use_adapters(self._device).free(each.slot)
            raise
        replaced = {each.name for each in fresh}
        for name in present:
            if name not in names or name in replaced:
                self._retire(self._loaded.pop(name))
        self._loaded |= {each.name: each for each in fresh}

    def release_unused(self) -> None:
        """Release the memory of unloaded adapters that no request uses any more."""
        for slot in sorted(self._retired - self._slots_in_use() if self._retired else ()):
            self._retired.discard(slot)
            self._model.use_adapters(self._device).free(slot)

    def _read(self, name: str, path: str, generation: int | None) -> LoadedAdapter:
        slots = self._model.use_adapters(self._device)
        slot = slots.first_free
        adapter = load_adapter(self._model, slot, Path(path), max_rank=self._max_rank, device=self._device)
        return LoadedAdapter(name, path, slot, adapter.digest, generation)

    def _retire(self, adapter: LoadedAdapter) -> None:
        self._retired.add(adapter.slot)
        self.release_unused()

    def _require_room(self, count: int) -> None:
        if count > self._limit:
            raise CheckpointError(
                f"{count} adapters are more than --max-loras {self._limit}; raise it, or unload another one"
            )

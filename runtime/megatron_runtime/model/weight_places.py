"""Weights that leave their GPU during a suspension, and return to the same addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_runtime.gpu.arena import PIECE, Arena


@dataclass(frozen=True)
class _Owner:
    """Where a module has a tensor. Its name within the model may change, when other modules are put around this one."""

    module: nn.Module
    name: str


class WeightPlaces:
    """The places of a model's parameters and buffers in an `Arena`.

    All are moved there at once, which needs little memory beside them. Tensors that modules compute from the addresses
    of their weights have to be computed again after that, but not after `release` and `restore`.

    Args:
        model: On a GPU without an `obstacle` of `gpu.driver_memory`.
        device: The GPU.

    Raises:
        torch.OutOfMemoryError: The GPU has no room for the largest tensor a second time.
        EngineError: As `Arena`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found, self._owners = _tensors_of(model)
        self._arena = Arena(device, [tensor.numel() * tensor.element_size() for tensor in found])
        self._there: list[Tensor] = []
        """Parameters and buffers in the arena."""
        self._move(found)
        self._is_released = False

    def release(self) -> None:
        """Move all to the host, and return the memory to the driver. Modules then have tensors on the CPU."""
        if not self._is_released:
            here = [_as(tensor, tensor.detach().to("cpu", copy=True)) for tensor in self._there]
            for number, tensor in enumerate(here):
                self._give(number, tensor)
            self._is_released = True
        self._arena.unmap()  # Also what a `restore` that failed has mapped.

    def restore(self) -> None:
        """Move all back; also other values that the tensors on the CPU have got meanwhile.

        Raises:
            torch.OutOfMemoryError: There is too little memory; nothing has changed.
        """
        if self._is_released:
            self._arena.map()
            for number, tensor in enumerate(self._there):
                owner = self._owners[number][0]
                tensor.detach().copy_(getattr(owner.module, owner.name).detach())
            for number, tensor in enumerate(self._there):
                self._give(number, tensor)
            self._is_released = False

    def _move(self, found: list[Tensor]) -> None:
        freed = 0
        found.reverse()
        while found:
            old, number = found.pop(), len(self._there)
            self._arena.map(number + 1)
            place = self._arena.tensor(number, old.shape, old.dtype)
            place.copy_(old.detach())
            self._there.append(_as(old, place))
            self._give(number, self._there[-1])
            freed += old.numel() * old.element_size()
            del old
            if freed >= PIECE or not found:
                torch.cuda.empty_cache()
                freed = 0

    def _give(self, number: int, tensor: Tensor) -> None:
        for owner in self._owners[number]:
            setattr(owner.module, owner.name, tensor)


def _as(like: Tensor, tensor: Tensor) -> Tensor:
    """A parameter, or a buffer."""
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


def _tensors_of(model: nn.Module) -> tuple[list[Tensor], list[list[_Owner]]]:
    """Parameters and buffers, and who has each of them: a table may serve embedding and head."""
    owners: dict[Tensor, list[_Owner]] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            owners.setdefault(tensor, []).append(_Owner(module, name))
    return list(owners), list(owners.values())

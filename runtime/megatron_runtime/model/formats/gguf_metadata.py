"""The metadata of a GGUF file, read with errors that name the key."""

from __future__ import annotations

from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.gguf_file import GgufFile


class GgufMetadata:
    """The metadata under one architecture's prefix, with errors that name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def get(self, key: str, default: Any) -> Any:
        """A number or a string, or ``default`` when it is absent."""
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) is not type(default) and not (
            isinstance(value, int | float) and isinstance(default, int | float)
        ):
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {_brief(value)}, expected one number")
        return value

    def flags(self, key: str) -> list[bool]:
        """A list of booleans; empty when it is absent."""
        found = self._file.metadata.get(f"{self._prefix}.{key}", [])
        if not isinstance(found, list):
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {_brief(found)}, expected a list")
        return [bool(flag) for flag in found]

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self._file.tensors

    def vector(self, name: str) -> tuple[float, ...]:
        """The numbers in a tensor of one dimension; empty when it is absent."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return ()
        return tuple(float(number) for number in self._file.rows(tensor, slice(0, 1))[0])

    def number(self, key: str) -> int:
        """A number that has to be there, as an integer."""
        if f"{self._prefix}.{key}" not in self._file.metadata:
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is missing. Convert the model again")
        return int(self.get(key, 0))

    def numbers(self, key: str, layers: int) -> list[int]:
        """A number for each layer: those of a list, or the same one for all."""
        found = self._file.metadata.get(f"{self._prefix}.{key}")
        if not isinstance(found, list):
            return [self.number(key)] * layers
        if len(found) != layers or not all(isinstance(each, int) and each >= 0 for each in found):
            raise self.error(key, _brief(found), f"{layers} numbers of at least 0")
        return found

    def size(self, key: str, layers: int) -> int:
        """A number that has to be there, or the only one besides zero in a list with one for each layer."""
        sizes = sorted({number for number in self.numbers(key, layers) if number})
        if len(sizes) > 1:
            raise self.error(key, f"{sizes[0]} in one layer and {sizes[1]} in another one", "one size for all layers")
        return sizes[0] if sizes else 0

    def error(self, key: str, found: str, expected: str) -> CheckpointError:
        """The error for a value that can't be served."""
        return CheckpointError(
            f"{self._file.path}: {self._prefix}.{key} is {found}, expected {expected}. "
            "Convert the model again, or choose another one"
        )

    def soft_cap(self, key: str) -> float | None:
        """A number above zero; None when it is absent or zero."""
        cap = float(self.get(key, 0.0))
        return cap if cap > 0.0 else None

    def require(self, key: str, expected: float) -> None:
        """Raise CheckpointError when the number is there and is another one."""
        if (value := self.get(key, expected)) != expected:
            raise CheckpointError(
                f"{self._file.path}: {self._prefix}.{key} is {value}, only {expected} is supported. "
                "Choose another model"
            )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."

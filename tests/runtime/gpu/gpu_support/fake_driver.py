"""The functions of NVIDIA's driver for ranges of addresses, over memory of the host, with the rules of its manual.

Stands for the module cuda.bindings.driver. Memory that is not mapped, and memory that is newly mapped, has only bits 1:
NaN, in tensors of floating point.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GRANULARITY = 1 << 16
GARBAGE = 0xFF


class CUresult(IntEnum):
    """Of every function."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


OK, INVALID, FULL = CUresult


@dataclass
class _Range:
    """Reserved addresses."""

    size: int
    pages: mmap.mmap
    offset: int
    """Of the first address in the pages."""

    def fill(self, start: int, size: int) -> None:
        self.pages[self.offset + start : self.offset + start + size] = bytes([GARBAGE]) * size


@dataclass
class _Allocation:
    size: int
    is_referenced: bool = True
    """Whether its handle was not released."""
    mappings: int = 0


@dataclass
class FakeDriver:
    """A GPU with ``memory`` bytes, whose device number is ``ordinal``."""

    memory: int = 1 << 40
    ordinal: int = 0
    has_virtual_memory: bool = True
    linked: set[int] = field(default_factory=set)
    """Ordinals of other GPUs, whose memory it can change atomically."""
    others: set[int] = field(default_factory=set)
    """Those of GPUs with other links."""
    failing: dict[str, CUresult] = field(default_factory=dict)
    """What functions return instead of doing anything."""
    calls: list[str] = field(default_factory=list)
    ranges: dict[int, _Range] = field(default_factory=dict)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By address: the size and the handle."""
    permitted: set[int] = field(default_factory=set)
    """Those of these addresses that may be read and written."""
    allocations: dict[int, _Allocation] = field(default_factory=dict)
    handles: int = 0

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="virtual memory")

    CUdevice_P2PAttribute = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="native atomics")

    @staticmethod
    def CUmemAllocationProp() -> Any:  # noqa: N802 - the driver's name
        """Where memory is allocated."""
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc() -> Any:  # noqa: N802
        """Who may use it."""
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    @property
    def used(self) -> int:
        """Bytes of the GPU's memory."""
        return sum(each.size for each in self.allocations.values())

    def covers(self, address: int, size: int, among: Any = None) -> bool:
        """Whether every one of these addresses is mapped, or ``among`` those mapped ones."""
        end = address + size
        for start, (length, _) in sorted(self.mapped.items()):
            if start <= address < start + length and (among is None or start in among):
                address = start + length
        return address >= end

    def check_use(self, address: int) -> None:
        """What the GPU does on a use of an address. Raises RuntimeError: it may not be used."""
        is_reserved = any(start <= address < start + each.size for start, each in self.ranges.items())
        if is_reserved and not self.covers(address, 1, self.permitted):
            raise RuntimeError(f"an illegal memory access: nothing is mapped at {address:#x}")

    def tensor_at(self, address: int, size: int, owner: object) -> Tensor:
        """As `arena.tensor_at`, on the CPU."""
        assert self.covers(address, size, self.permitted), f"nothing is mapped at {address:#x}"
        start, found = next(item for item in self.ranges.items() if item[0] <= address < item[0] + item[1].size)
        buffer = (ctypes.c_char * size).from_buffer(found.pages, found.offset + address - start)
        buffer.owner = owner  # type: ignore[attr-defined] # kept as long as a tensor of this memory, or a view of it
        made = torch.frombuffer(buffer, dtype=torch.uint8)
        assert made.data_ptr() == address
        return made

    # The driver's functions.

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, str | None]:  # noqa: N802
        """The device of this number."""
        found = (OK, f"device {ordinal}") if ordinal in self.linked | self.others else (INVALID, None)
        return self._answer("cuDeviceGet", (OK, "device") if ordinal == self.ordinal else found)

    def cuDeviceGetP2PAttribute(self, attribute: str, source: str, target: str) -> tuple[CUresult, int]:  # noqa: N802
        """Whether the link between two GPUs has atomic operations."""
        assert (attribute, source) == ("native atomics", "device")
        is_linked = int(target.removeprefix("device ")) in self.linked
        return self._answer("cuDeviceGetP2PAttribute", (OK, int(is_linked)))

    def cuDeviceGetAttribute(self, attribute: str, device: str) -> tuple[CUresult, int]:  # noqa: N802
        """Whether it has virtual memory management."""
        assert (attribute, device) == ("virtual memory", "device")
        return self._answer("cuDeviceGetAttribute", (OK, int(self.has_virtual_memory)))

    def cuMemGetAllocationGranularity(self, properties: Any, kind: str) -> tuple[CUresult, int]:  # noqa: N802
        """Of all sizes and addresses."""
        assert (kind, properties.location.id) == ("recommended", self.ordinal)
        return self._answer("cuMemGetAllocationGranularity", (OK, GRANULARITY))

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[CUresult, int | None]:
        """Reserve addresses."""
        if self._refuses("cuMemAddressReserve", size) or (alignment, address, flags) != (0, 0, 0):
            return INVALID, None
        pages = mmap.mmap(-1, size + GRANULARITY)
        first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        found = _Range(size, pages, -first % GRANULARITY)
        found.fill(0, size)
        self.ranges[first + found.offset] = found
        return OK, first + found.offset

    def cuMemAddressFree(self, address: int, size: int) -> tuple[CUresult]:  # noqa: N802
        """Undo it: the whole range, of which nothing is mapped."""
        known = self.ranges.get(address)
        if self._refuses("cuMemAddressFree", size) or known is None or known.size != size:
            return (INVALID,)
        if any(address <= start < address + size for start in self.mapped):
            return (INVALID,)
        del self.ranges[address]
        return (OK,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, int | None]:  # noqa: N802
        """Allocate memory, which has no address yet."""
        where = (properties.type, properties.location.type, properties.location.id)
        if self._refuses("cuMemCreate", size) or (*where, flags) != ("pinned", "device", self.ordinal, 0):
            return INVALID, None
        if "cuMemCreate" in self.failing or self.used + size > self.memory:
            return self.failing.get("cuMemCreate", FULL), None
        self.handles += 1
        self.allocations[self.handles] = _Allocation(size)
        return OK, self.handles

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:  # noqa: N802
        """Give up a handle; mappings keep the memory."""
        self.calls.append("cuMemRelease")
        known = self.allocations.get(handle)
        if known is None or not known.is_referenced:
            return (INVALID,)
        known.is_referenced = False
        self._free_unused(handle)
        return (OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:  # noqa: N802
        """Give memory an address, within one range, where nothing is mapped yet."""
        known = self.allocations.get(handle)
        if self._refuses("cuMemMap", size) or (offset, flags) != (0, 0) or address % GRANULARITY:
            return (INVALID,)
        if known is None or not known.is_referenced or size > known.size:
            return (INVALID,)
        if not any(start <= address and address + size <= start + r.size for start, r in self.ranges.items()):
            return (INVALID,)
        if any(address < start + length and start < address + size for start, (length, _) in self.mapped.items()):
            return (INVALID,)
        if "cuMemMap" in self.failing:
            return (self.failing["cuMemMap"],)
        self.mapped[address] = size, handle
        known.mappings += 1
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[CUresult]:  # noqa: N802
        """Permit the use of mapped addresses."""
        (given,) = access
        assert (given.location.type, given.location.id, given.flags) == ("device", self.ordinal, "read and write")
        if self._refuses("cuMemSetAccess", size) or count != 1 or not self.covers(address, size):
            return (INVALID,)
        if "cuMemSetAccess" in self.failing:
            return (self.failing["cuMemSetAccess"],)
        self.permitted |= {start for start in self.mapped if address <= start < address + size}
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[CUresult]:  # noqa: N802
        """Undo whole mappings."""
        if self._refuses("cuMemUnmap", size) or address not in self.mapped or self.mapped[address][0] != size:
            return (INVALID,)
        _, handle = self.mapped.pop(address)
        self.permitted.discard(address)
        start, found = next(item for item in self.ranges.items() if item[0] <= address < item[0] + item[1].size)
        found.fill(address - start, size)
        self.allocations[handle].mappings -= 1
        self._free_unused(handle)
        return (OK,)

    def cuGetErrorName(self, result: CUresult) -> tuple[CUresult, bytes]:  # noqa: N802
        """Of a result."""
        return OK, result.name.encode()

    def cuGetErrorString(self, result: CUresult) -> tuple[CUresult, bytes | None]:  # noqa: N802
        """Of a result."""
        return OK, {INVALID: b"invalid argument", FULL: b"out of memory"}.get(result)

    def _refuses(self, name: str, size: int) -> bool:
        self.calls.append(name)
        return size <= 0 or size % GRANULARITY != 0

    def _answer(self, name: str, usual: tuple[CUresult, Any]) -> tuple[CUresult, Any]:
        return (self.failing[name], None) if name in self.failing else usual

    def _free_unused(self, handle: int) -> None:
        if not self.allocations[handle].is_referenced and not self.allocations[handle].mappings:
            del self.allocations[handle]

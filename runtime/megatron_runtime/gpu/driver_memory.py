"""The functions of NVIDIA's driver that keep addresses apart from memory, for one GPU."""

from __future__ import annotations

from typing import Any

import torch

from megatron_runtime.errors import EngineError


def import_driver() -> Any:
    """The module of cuda-bindings, on which PyTorch's build with CUDA depends. Raises ImportError without it."""
    from cuda.bindings import driver

    return driver


def obstacle(device: torch.device) -> str | None:
    """Why memory of this GPU can't return to the driver without its addresses; None if it can."""
    try:
        driver = import_driver()
    except ImportError as error:
        return f"the package cuda-bindings is missing ({error})"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    result, number = driver.cuDeviceGet(_index(device))
    if result == driver.CUresult.CUDA_SUCCESS:
        result, found = driver.cuDeviceGetAttribute(supported, number)
    if result != driver.CUresult.CUDA_SUCCESS:
        return f"the driver does not answer: {_words(driver, result)}"
    return _try(device) if found else "this GPU, or its driver, has no virtual memory management"


def _try(device: torch.device) -> str | None:
    """What fails with the smallest piece of memory; a virtual GPU may refuse it in spite of the attribute."""
    try:
        memory = DriverMemory(device)
        size = memory.granularity
        address = memory.reserve(size)
        try:
            memory.map(address, size)
            try:
                memory.permit(address, size)
            finally:
                memory.unmap(address, size)
        finally:
            memory.free_addresses(address, size)
    except (EngineError, torch.OutOfMemoryError) as error:
        return str(error)
    return None


class DriverMemory:
    """Reserves addresses and maps memory to them.

    All sizes and addresses are multiples of ``granularity``. The order of the calls for a piece of memory is `reserve`,
    `map`, `permit`, `unmap`, `free_addresses`.

    Args:
        device: The GPU, without an `obstacle`.

    Raises:
        EngineError: The driver refuses; every method raises this, with the name of the driver's error.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = driver = import_driver()
        self._location_id = _index(device)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = self._location_id
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity: int = self._call("cuMemGetAllocationGranularity", self._properties, recommended)

    def reserve(self, size: int) -> int:
        """The first of ``size`` addresses that nothing else gets."""
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free_addresses(self, address: int, size: int) -> None:
        """Undo `reserve`; nothing is mapped there."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Take memory from the driver for reserved addresses. It has no defined contents.

        Raises:
            torch.OutOfMemoryError: The GPU has too little.
        """
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory: it returns to the driver when it is unmapped.
            self._call("cuMemRelease", handle)

    def permit(self, address: int, size: int) -> None:
        """Let the GPU read and write mapped addresses."""
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._location_id
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Return the memory of one `map` to the driver. The GPU has no work in progress that uses it."""
        self._call("cuMemUnmap", address, size)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The value that a function returns, if any."""
        result, *values = getattr(self._driver, name)(*arguments)
        if result == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name} of {arguments[0]} bytes: {_words(self._driver, result)}")
        if result != self._driver.CUresult.CUDA_SUCCESS:
            numbers = ", ".join(hex(each) for each in arguments if isinstance(each, int))
            raise EngineError(f"{name}({numbers}) on cuda:{self._location_id}: {_words(self._driver, result)}")
        return values[0] if values else None


def _index(device: torch.device) -> int:
    """PyTorch and the driver count the GPUs that CUDA_VISIBLE_DEVICES leaves alike."""
    return torch.cuda.current_device() if device.index is None else device.index


def _words(driver: Any, result: Any) -> str:
    """Like ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    (_, name), (_, description) = driver.cuGetErrorName(result), driver.cuGetErrorString(result)
    return f"{_text(name, result)} ({_text(description, 'unknown')})"


def _text(given: bytes | None, otherwise: object) -> str:
    return str(otherwise) if given is None else given.decode(errors="replace")

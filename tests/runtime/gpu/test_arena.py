"""Memory that returns to the driver without its addresses, over a fake driver with the rules of the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from gpu_support.fake_driver import GRANULARITY, CUresult, FakeDriver
from gpu_support.pretended import DEVICE, pretended_device
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from megatron_runtime.errors import EngineError
from megatron_runtime.gpu import arena, driver_memory
from megatron_runtime.gpu.arena import Arena
from megatron_runtime.gpu.driver_memory import obstacle
from megatron_runtime.model.weight_places import WeightPlaces

SECOND = torch.device("cuda:1")
SIZES = [3 * GRANULARITY, 4, 0, GRANULARITY + 512, 40]
ALL = 5 * GRANULARITY
"""Bytes of memory for tensors of these sizes."""


@contextmanager
def second_gpu(fake: FakeDriver) -> Iterator[FakeDriver]:
    """The driver, and PyTorch's tensors over its memory; pieces of two times the granularity."""
    waits = {"init": lambda: None, "synchronize": lambda _: fake.calls.append("wait"), "empty_cache": lambda: None}
    with ExitStack() as stack:
        for each in (
            patch.multiple(torch.cuda, **waits),
            patch.object(driver_memory, "import_driver", lambda: fake),
            patch.object(arena, "tensor_at", lambda address, size, _, owner: fake.tensor_at(address, size, owner)),
            patch.object(arena, "PIECE", 2 * GRANULARITY - 1),
        ):
            stack.enter_context(each)
        yield fake
    assert (fake.ranges, fake.mapped, fake.allocations) == ({}, {}, {}), "an arena has left something"


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """Of the second GPU."""
    with second_gpu(FakeDriver(ordinal=1)) as fake:
        yield fake


def tensors_of(made: Arena) -> list[Tensor]:
    return [made.tensor(index, (size,), torch.uint8) for index, size in enumerate(SIZES)]


def test_memory_goes_and_comes_and_addresses_stay(driver: FakeDriver) -> None:
    made = Arena(SECOND, SIZES)
    assert (made.num_bytes, driver.used) == (ALL, 0)
    made.map()
    tensors = tensors_of(made)
    addresses = [each.data_ptr() for each in tensors if len(each)]
    assert all(address % 512 == 0 for address in addresses)
    for index, each in enumerate(tensors):
        each.fill_(index)
    assert [each.unique().tolist() for each in tensors] == [[0], [1], [], [3], [4]], "some tensors overlap"
    assert driver.used == ALL
    made.unmap()
    made.unmap()
    assert driver.used == 0
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.check_use(addresses[0])
    made.map()
    made.map()
    assert driver.used == ALL
    assert [each.data_ptr() for each in tensors_of(made) if len(each)] == addresses
    assert tensors[0].unique().tolist() == [255], "memory of the driver has no old contents"


def test_the_gpu_ends_its_work_before_memory_is_unmapped(driver: FakeDriver) -> None:
    made = Arena(SECOND, SIZES)
    made.map()
    made.unmap()
    made.map()
    del made
    calls = [name for name in driver.calls if name in ("wait", "cuMemUnmap", "cuMemAddressFree")]
    pieces = ["cuMemUnmap"] * 3
    assert calls == ["wait", *pieces, "wait", *pieces, "cuMemAddressFree"]


def test_a_tensor_keeps_the_memory_of_its_arena(driver: FakeDriver) -> None:
    made = Arena(SECOND, SIZES)
    made.map()
    view = tensors_of(made)[3][500:].view(torch.int32)
    view.fill_(7)
    del made
    assert driver.used == ALL
    assert view.unique().tolist() == [7]
    del view
    assert (driver.used, driver.ranges) == (0, {})


def test_tensors_can_be_mapped_one_after_the_other(driver: FakeDriver) -> None:
    made = Arena(SECOND, SIZES)
    used = []
    for count in range(len(SIZES) + 1):
        made.map(count)
        used.append(driver.used // GRANULARITY)
    assert used == [0, 4, 4, 4, 5, 5]


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_error_of_the_driver_has_its_name_and_changes_nothing(name: str, driver: FakeDriver) -> None:
    made = Arena(SECOND, SIZES)
    made.map(1)
    used = driver.used
    driver.failing[name] = CUresult.CUDA_ERROR_INVALID_VALUE
    expected = rf"^{name}\(0x.*\) on cuda:1: CUDA_ERROR_INVALID_VALUE \(invalid argument\)$"
    with pytest.raises(EngineError, match=expected):
        made.map()
    assert driver.used == used
    driver.failing.clear()
    made.map()
    assert driver.used == ALL


def test_a_lack_of_memory_changes_nothing_and_is_tried_again_without_the_cache_of_pytorch(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Arena(SECOND, SIZES)
    driver.memory = ALL - GRANULARITY
    with pytest.raises(torch.OutOfMemoryError, match=r"cuMemCreate of 65536 bytes: CUDA_ERROR_OUT_OF_MEMORY \(out of"):
        made.map()
    assert driver.used == 0

    def empty_cache() -> None:
        driver.memory = ALL

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    made.map()
    assert driver.used == ALL


def test_what_a_device_lacks_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle(SECOND) is None
    assert driver.ranges == {}
    with monkeypatch.context() as patched:
        patched.setattr(driver, "has_virtual_memory", False)
        assert obstacle(SECOND) == "this GPU, or its driver, has no virtual memory management"
    assert obstacle(torch.device("cuda:0")) == "the driver does not answer: CUDA_ERROR_INVALID_VALUE (invalid argument)"
    for name in ("cuMemGetAllocationGranularity", "cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        driver.failing = {name: CUresult.CUDA_ERROR_INVALID_VALUE}
        found = obstacle(SECOND)
        assert found is not None
        assert found.startswith(f"{name}(")
        assert (driver.ranges, driver.allocations) == ({}, {})
    driver.failing = {}

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(driver_memory, "import_driver", missing)
    assert obstacle(SECOND) == "the package cuda-bindings is missing (No module named 'cuda')"


def test_an_error_while_an_arena_ends_is_logged(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    made = Arena(SECOND, SIZES)
    known = driver.ranges.copy()
    driver.ranges.clear()
    with caplog.at_level(logging.WARNING):
        del made
        assert len(known) == 1
    assert "327680 bytes of addresses on cuda:1 can't be returned to the driver: cuMemAddressFree(" in caplog.text


def test_an_arena_that_is_found_after_the_end_of_a_pretended_device_logs_nothing(
    device_guard: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.11 can't build a syntax tree while a log handler that failed reads the sources of a traceback."""
    del device_guard
    with pretended_device():
        made = Arena(DEVICE, SIZES)
        made.map()
    with caplog.at_level(logging.WARNING):
        del made
    assert caplog.text == ""


class Tied(nn.Module):
    """Weights of two types, one of which two modules have, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 400)
        self.second = nn.Module()
        self.second.table = self.first.weight
        self.narrow = nn.Parameter(torch.randn(500, 300).half(), requires_grad=False)
        self.register_buffer("numbers", torch.arange(5))


def test_weights_return_to_their_places_with_the_values_that_they_got_meanwhile(driver: FakeDriver) -> None:
    model = Tied()
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    places = WeightPlaces(model, SECOND)
    there = {name: each.data_ptr() for name, each in model.state_dict().items()}
    used = driver.used
    assert used >= sum(each.nbytes for each in expected.values()) - expected["first.weight"].nbytes
    assert all(driver.covers(address, 1) for address in there.values())
    for factor in (1, 3):
        places.release()
        places.release()
        assert driver.used == 0
        assert not any(driver.covers(each.data_ptr(), 1) for each in model.state_dict().values())
        outer = nn.ModuleDict({"around": model})  # as adapters are put around modules
        with torch.no_grad():
            model.first.weight.mul_(factor)
        places.restore()
        places.restore()
        assert driver.used == used
        assert {name: each.data_ptr() for name, each in model.state_dict().items()} == there
        assert model.second.table is model.first.weight
        expected["first.weight"] *= factor
        expected["second.table"] = expected["first.weight"]
        found = outer["around"].state_dict()
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_weights_that_find_no_memory_stay_on_the_host(driver: FakeDriver) -> None:
    model = Tied()
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    places = WeightPlaces(model, SECOND)
    places.release()
    driver.memory = GRANULARITY
    with pytest.raises(torch.OutOfMemoryError):
        places.restore()
    assert driver.used == 0
    driver.memory = 1 << 30
    places.restore()
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


class RandomLives(RuleBasedStateMachine):
    """Arenas of a GPU of limited memory that are made, mapped in part, unmapped and dropped in any order."""

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.driver = self.stack.enter_context(second_gpu(FakeDriver(memory=12 * GRANULARITY, ordinal=1)))
        self.arenas: list[tuple[Arena, list[int]]] = []
        self.contents: dict[int, dict[int, tuple[Tensor, int]]] = {}
        self.number = 0

    @rule(sizes=st.lists(st.integers(1, 3 * GRANULARITY), min_size=1, max_size=4))
    def make(self, sizes: list[int]) -> None:
        self.arenas.append((Arena(SECOND, sizes), sizes))

    @precondition(lambda self: self.arenas)
    @rule(which=st.integers(0, 9), count=st.integers(0, 4))
    def map(self, which: int, count: int) -> None:
        made, sizes = self.arenas[which % len(self.arenas)]
        count, before = min(count, len(sizes)), self.driver.used
        try:
            made.map(count)
        except torch.OutOfMemoryError:
            assert self.driver.used == before
            return
        held = self.contents.setdefault(id(made), {})
        for index in range(count):
            if index not in held:
                self.number = (self.number + 1) % 255
                held[index] = made.tensor(index, (sizes[index],), torch.uint8).fill_(self.number), self.number

    @precondition(lambda self: self.arenas)
    @rule(which=st.integers(0, 9))
    def unmap(self, which: int) -> None:
        made, _ = self.arenas[which % len(self.arenas)]
        made.unmap()
        self.contents.pop(id(made), None)

    @precondition(lambda self: self.arenas)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        made, _ = self.arenas.pop(which % len(self.arenas))
        self.contents.pop(id(made), None)

    @invariant()
    def contents_are_as_written(self) -> None:
        for held in self.contents.values():
            for tensor, number in held.values():
                assert int(tensor[0]) == int(tensor[-1]) == number

    @invariant()
    def the_memory_in_use_is_that_of_mapped_tensors(self) -> None:
        assert len(self.driver.ranges) == len(self.arenas)
        assert self.driver.permitted == self.driver.mapped.keys()
        assert self.driver.used == sum(size for size, _ in self.driver.mapped.values()) <= self.driver.memory

    def teardown(self) -> None:
        self.arenas.clear()
        self.contents.clear()
        self.stack.close()


RandomLives.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestRandomLives = RandomLives.TestCase

"""Host memory is allocated so that it can return to the system."""

from __future__ import annotations

import pytest
import torch
from runtime_support.resident_memory import resident_share

from megatron_runtime.model.host_memory import empty_matrix, zeros

COUNT, ROWS, COLUMNS = 64, 256, 1024


def addresses(matrix: torch.Tensor) -> range:
    return range(matrix.data_ptr(), matrix.data_ptr() + matrix.nbytes)


def test_released_matrices_return_their_memory() -> None:
    matrices = [empty_matrix(ROWS, COLUMNS, torch.float32) for _ in range(COUNT)]
    for matrix in matrices:
        matrix.fill_(1.0)
    kept, released = map(addresses, matrices[1::2]), list(map(addresses, matrices[::2]))
    assert resident_share(released) == 1
    del matrices[::2], matrix
    assert resident_share(released) < 0.1
    assert resident_share(kept) == 1
    assert all(bool((matrix == 1.0).all()) for matrix in matrices)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (1, 1), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_has_the_requested_shape_and_type(rows: int, columns: int, dtype: torch.dtype) -> None:
    matrix = empty_matrix(rows, columns, dtype)
    assert (matrix.shape, matrix.dtype, matrix.requires_grad) == ((rows, columns), dtype, False)
    assert matrix.is_contiguous()


def test_the_default_device_has_the_matrix() -> None:
    with torch.device("meta"):
        assert empty_matrix(2**20, 2**20, torch.float32).device.type == "meta"


def test_zeros_use_memory_when_they_are_written_to() -> None:
    storage = zeros((4, ROWS, COLUMNS), torch.bfloat16)
    assert (storage.shape, storage.dtype) == ((4, ROWS, COLUMNS), torch.bfloat16)
    large = zeros((COUNT, ROWS, COLUMNS), torch.float32)
    assert resident_share([addresses(storage), addresses(large)]) < 0.1
    assert not storage.any()
    large.fill_(1.0)
    assert resident_share([addresses(large)]) == 1


def test_more_zeros_than_memory_are_refused() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        zeros((2**62,), torch.float32)
    assert zeros((0, 3), torch.float32).shape == (0, 3)

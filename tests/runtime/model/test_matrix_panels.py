"""Panels of matrices for the kernels of products, and the memory that packing takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime_support.resident_memory import peak_growth
from torch import Tensor

from megatron_runtime.model.kernels import tile_products, vector_products

MIB = 2**20


@pytest.mark.parametrize("pack", [vector_products.pack, tile_products.pack], ids=["vectors", "tiles"])
def test_packing_takes_the_memory_of_the_panels_alone(pack: Callable[[Tensor], Tensor]) -> None:
    """Of rows that do not fill their last panel, such as those of a vocabulary of 50,257 tokens."""
    matrix = torch.ones(32_001, 1024, dtype=torch.bfloat16)
    panels, growth = peak_growth(lambda: pack(matrix))
    assert panels.nbytes >= matrix.nbytes
    assert growth < panels.nbytes + 8 * MIB

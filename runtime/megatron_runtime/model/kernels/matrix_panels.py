"""Panels of a matrix: groups of its rows in the order in which a kernel reads them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def fill_panels(panels: Tensor, matrix: Tensor, rows: int) -> None:
    """Copy a matrix, whose last panel is padded with zeros. Needs no memory beyond that of a panel.

    Args:
        panels: [panels, ...], in any order in memory; the shape of a panel is that of its rows and their columns.
        matrix: [out, columns], contiguous.
        rows: Rows of a panel.
    """
    whole = len(matrix) // rows
    panels[:whole] = matrix[: whole * rows].view(whole, *panels.shape[1:])
    if whole < len(panels):
        rest = matrix[whole * rows :]
        panels[whole] = functional.pad(rest, (0, 0, 0, rows - len(rest))).view(panels.shape[1:])


def pad_columns(matrix: Tensor, multiple: int) -> Tensor:
    """A contiguous matrix with further columns of zeros, or the matrix itself if its width is a multiple."""
    missing = -matrix.shape[1] % multiple
    return functional.pad(matrix, (0, missing)) if missing else matrix.contiguous()

"""Quantities and durations in a resource."""

from __future__ import annotations

import pytest

from megatron_operator.api.quantity import Duration, MemorySize, Quantity


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256Mi", 256 * 2**20),
        ("20Gi", 20 * 2**30),
        ("1.5G", 1_500_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("0.5", 1),
    ],
)
def test_a_quantity_is_a_number_of_bytes(text: str | int, size: int) -> None:
    assert Quantity(text) == size


def test_a_quantity_keeps_its_notation() -> None:
    assert Quantity("1.5Gi").text == "1.5Gi"


@pytest.mark.parametrize("text", ["0", "0Gi", "0.0", 0])
def test_a_memory_size_is_greater_than_zero(text: str | int) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        MemorySize(text)


@pytest.mark.parametrize("text", ["lots", "-1Gi", "1 Gi", "1GiB", "1e9Gi", "", True, 1.5, None, 2**63])
def test_an_invalid_memory_size_is_rejected_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="like 256Mi or 20Gi"):
        Quantity(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "length"), [("90s", 90), ("2m", 120), ("1h30m", 5400), ("500ms", 0.5), ("0s", 0), ("1.5h", 5400)]
)
def test_a_duration_is_a_number_of_seconds(text: str, length: float) -> None:
    assert Duration(text) == length
    assert Duration(text).text == text


@pytest.mark.parametrize("text", ["1 minute", "60", "-1s", "", "1d", 60, None])
def test_an_invalid_duration_is_rejected_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="like 90s, 2m or 1h30m"):
        Duration(text)  # type: ignore[arg-type]

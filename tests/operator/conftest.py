"""Puts planning_support on the path, which pytest's importlib mode does not; a fleet for the tests of activators."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from planning_support.activating import shorten_times  # noqa: E402
from planning_support.fleet import Fleet  # noqa: E402


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """A namespace of models whose servers run here, with short times."""
    shorten_times(monkeypatch)
    fleet = Fleet()
    yield fleet
    await fleet.stop()

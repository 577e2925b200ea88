"""Fixtures: a coordinator with whatever a test puts around it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # messaging_support lies here, and importlib mode puts nothing on the path

from messaging_support.fleet import Fleet  # noqa: E402


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A coordinator in a thread, without engines and clients yet."""
    async with Fleet() as started:
        started.start_coordinator()
        yield started

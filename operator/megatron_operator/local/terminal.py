"""Runs a session on a terminal or a pipe, with the view that fits and signal handlers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from megatron_operator.local.plain_view import PlainView
from megatron_operator.local.pod_manifest import PathMap
from megatron_operator.local.session import LocalSession
from megatron_operator.local.snapshot import View
from megatron_operator.local.table_view import TableView


@contextmanager
def session_on(console: Console, file: Path, paths: PathMap) -> Iterator[tuple[LocalSession, View]]:
    """A session that SIGINT and SIGTERM stop, not started yet, and its view. Requires a running event loop."""
    view = TableView(console) if console.is_terminal else PlainView(console)
    try:
        session = LocalSession(file, paths=paths, view=view)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, session.stop)
        yield session, view
    finally:
        view.close()

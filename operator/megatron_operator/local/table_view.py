"""The view for a terminal: a table of at most 80 columns that is redrawn at every step."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable
from datetime import timedelta

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_operator.api.v1alpha1 import Phase
from megatron_operator.local.snapshot import Snapshot, pod_state
from megatron_operator.observed_state import Loading, ObservedPod
from megatron_operator.styles import styled

BAR_WIDTH = 6
MEGA = 1_000_000


class TableView:
    """Draws every snapshot in place; printed lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stderr=False, transient=True)
        self._echo = _without_echo()
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Draw the snapshot."""
        self._live.update(draw(snapshot), refresh=True)

    def say(self, text: str) -> None:
        """Print above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop drawing; the last table stays on the screen."""
        self._live.stop()
        self._echo()


def _without_echo() -> Callable[[], None]:
    """Turn off echo, so that typed keys (such as ^C) do not appear in the table. The result restores it."""
    if not sys.stdin.isatty():
        return lambda: None
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    return lambda: termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def draw(snapshot: Snapshot) -> RenderableType:
    """The complete table."""
    resource = snapshot.resource
    title = f"{resource.metadata.namespace}/{resource.name}  desired: {resource.spec.lifecycle}"
    parts: list[RenderableType] = [_summary(snapshot), ""]
    if not snapshot.ending:
        parts += [_conditions(snapshot), ""]
    parts.append(_pods(snapshot))
    parts += [Text(f"refused: {problem}", style="bold red") for problem in snapshot.problems]
    hint = (
        "ending; Ctrl-C again kills the pods at once"
        if snapshot.ending
        else "edit the file to change it; Ctrl-C ends it"
    )
    return Panel(Group(*parts), title=title, title_align="left", subtitle=hint, subtitle_align="right", box=box.ROUNDED)


def _summary(snapshot: Snapshot) -> RenderableType:
    status, engine = snapshot.status, snapshot.observed.engine
    table = _table("PHASE", "ENGINE", "READY", "RESTARTS", "ELAPSED", "RUNNING", "WAITING", "TOKENS/S")
    desired = snapshot.resource.spec.replicas
    elapsed = str(timedelta(seconds=int(snapshot.elapsed)))
    if snapshot.ending:
        phase, state, ready, url = str(Phase.TERMINATING), "-", 0, None
    else:
        phase, state, url = str(status.phase), status.engine_state or "-", status.url
        ready = status.ready_replicas
    traffic = ("-", "-", "-")
    if engine is not None and engine.reachable and not snapshot.ending:
        traffic = (str(engine.running_requests), str(engine.waiting_requests), f"{snapshot.tokens_per_second:.1f}")
    table.add_row(styled(phase), styled(state), f"{ready}/{desired}", str(status.restarts), elapsed, *traffic)
    return table if url is None else Group(table, Text.assemble(("URL ", "dim"), url))


def _conditions(snapshot: Snapshot) -> Table:
    table = _table("CONDITION", "STATUS", "REASON")
    table.add_column("MESSAGE", style="dim", overflow="fold")
    for condition in snapshot.status.conditions:
        table.add_row(condition.type, styled(condition.status), condition.reason, Text(condition.message))
    return table


def _pods(snapshot: Snapshot) -> Table:
    table = _table("POD", "ROLE", "ADDRESS", "STATE", "ENGINE", "WEIGHTS")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for pod in snapshot.pods:
        role = "leader" if pod.leader else "worker"
        state = styled(pod_state(pod))
        table.add_row(pod.name, role, pod.address or "-", state, styled(snapshot.replica_state(pod)), _weights(pod))
    return table


def _weights(pod: ObservedPod) -> RenderableType:
    if pod.loading is None:
        return Text("-", style="dim")
    if pod.loading.loaded_bytes >= pod.loading.total_bytes:
        return Text(f"{pod.loading.total_bytes // MEGA} MB", style="dim")
    return _bar(pod.loading)


def _bar(loading: Loading) -> Table:
    row = Table.grid(padding=(0, 1))
    percent = loading.loaded_bytes * 100 // max(loading.total_bytes, 1)
    row.add_row(ProgressBar(loading.total_bytes, loading.loaded_bytes, width=BAR_WIDTH), Text(f"{percent} %"))
    return row


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table

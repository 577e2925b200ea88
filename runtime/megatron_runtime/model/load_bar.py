"""A progress bar for loading a model in a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_runtime.model.weights import LoadProgress


class LoadBar:
    """Bytes of the weights, rate and remaining time: ``with LoadBar() as bar: load_model(path, on_progress=bar)``.

    Drawn on standard error, or on ``console``. Without a terminal only the result is written, at the end.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("Loading"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True))
        self._task = self._bar.add_task("", total=None, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, progress: LoadProgress) -> None:
        """For ``on_progress`` of `load_model`."""
        rate = f"{decimal(int(progress.bytes_per_second))}/s"
        self._bar.update(self._task, completed=progress.loaded_bytes, total=progress.total_bytes, rate=rate)

"""Traces of an engine's steps by PyTorch's profiler."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER_VARIABLE = "MEGATRON_PROFILE_FOLDER"
"""Names the folder of the traces; by default ``megatron-profiles`` in the folder for temporary files."""

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records at most one trace at a time. Start and stop it in the thread that runs the steps."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self) -> None:
        """Begin a trace, unless one is being recorded."""
        if self._running is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        running = profile(activities=activities)
        running.start()
        self._running = running

    def stop(self) -> Path | None:
        """End the trace and write it in the format of Chrome's viewer; returns its path, None if there is none."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        running.stop()
        default = Path(tempfile.gettempdir()) / "megatron-profiles"
        folder = Path(os.environ.get(FOLDER_VARIABLE) or default)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        running.export_chrome_trace(str(path))
        logger.info("wrote the trace %s", path)
        return path

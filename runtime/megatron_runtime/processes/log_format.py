"""Log lines of the launcher and its children, with time and level: as text, or as JSON for log collectors."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
FORMAT_VARIABLE = "MEGATRON_LOG_FORMAT"
"""Passes the launcher's format to its children."""
PROCESS_VARIABLE = "MEGATRON_LOG_PROCESS"
"""The role of a child, like ``rank 0``, for its JSON lines."""
LAUNCHER = "launcher"


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z LEVEL logger: message``; the launcher adds the role of a child."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and below it the traceback of an exception."""
        head = f"{timestamp(record.created)} {record.levelname} {record.name}: "
        return head + super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``process``, ``logger``, ``message`` and ``exception``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, also for messages of several lines."""
        entry = {
            "time": timestamp(record.created),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(level: str | int) -> None:
    """Logs to standard error in the format of this process' environment."""
    process = os.environ.get(PROCESS_VARIABLE)
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(FORMAT_VARIABLE) == JSON:
        handler.setFormatter(JsonFormatter(process or LAUNCHER))
    elif process is None:
        handler.setFormatter(_LauncherFormatter())
    else:
        handler.setFormatter(TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _LauncherFormatter(TextFormatter):
    """The launcher has no parent that adds its role."""

    def format(self, record: logging.LogRecord) -> str:
        return f"[{LAUNCHER}] {super().format(record)}"


def relayed(process: str, line: str) -> str:
    """A child's line of output for the log of the launcher. JSON lines keep their format."""
    if line.startswith("{") and line.endswith("}"):
        return line
    if os.environ.get(FORMAT_VARIABLE) != JSON:
        return f"[{process}] {line}"
    # Not from the logger: the output of a library, or the traceback of an unexpected end.
    return json.dumps({"time": timestamp(time.time()), "level": "INFO", "process": process, "message": line})

"""``megatron-serve model fetch --into``: fills a folder of a model cache, and reports the progress to an operator."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from threading import Thread

from megatron_runtime.launch.identity import Identity
from megatron_runtime.launch.model_cache import Download, Source, fill, report_success
from megatron_runtime.launch.ports import CONTROL_PORT
from megatron_runtime.server.listening_socket import bind


def download_into(folder: Path, source: Source) -> Path:
    """Fills the folder and returns it. In a pod of an operator, the control API serves the progress meanwhile.

    Raises CheckpointError, ConfigurationError or OSError.
    """
    identity = Identity.from_environment(os.environ)
    download = Download(folder)
    if identity.bind_host is not None and identity.control_token is not None:
        _serve_progress(download, identity.bind_host, identity.control_token)
    fill(download, source)
    if unverifiable := [file.name for file in download.files or () if not file.is_verifiable]:
        words = unverifiable[0] if len(unverifiable) == 1 else f"{len(unverifiable)} files"
        print(f"model: no checksum is stated of {words}; only the size was compared", file=sys.stderr)
    report_success(download)
    return folder


def _serve_progress(download: Download, host: str, token: str) -> None:
    """In a daemon thread, which ends with the process."""
    # Only pods need them, and FastAPI takes half of the start of this command.
    from megatron_runtime.launch.control_api import create_download_api
    from megatron_runtime.server.http_server import HttpServer

    listening = bind(host, CONTROL_PORT, CONTROL_PORT, flag="--control-port", may_move=False)
    server = HttpServer(create_download_api(download.body, token=token))
    Thread(target=lambda: asyncio.run(server.serve([listening])), name="progress", daemon=True).start()

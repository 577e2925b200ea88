"""Our frontend as the launcher starts it, with our coordinator and an engine without a model behind it."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from coordinators.ours import PATIENT, serve_engines
from coordinators.processes import start_processes
from frontends.protocol import MODEL, TOKEN_TEXT, Stand, serve
from frontends.tokenizer import write_tokenizer
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.server.listening_socket import bind
from megatron_runtime.server.options import FrontendOptions

KEPT: list[object] = []
"""What must last as long as this process: a child's readers end with it, and its files with their folder."""


async def open_stand() -> Stand:
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / "metrics").mkdir()
    _, address = await start_processes(
        DataParallelInferenceCoordinator.entrypoint,
        1,
        work=partial(serve_engines, engines=1, text_of_token=TOKEN_TEXT),
        engine_timeout=PATIENT,
    )
    listening = bind("127.0.0.1", 0, 0, flag="--port", may_move=False)
    options = FrontendOptions(address, str(folder), MODEL, max_sequence_length=4096)
    serving = asyncio.Event()
    frontend = Child(
        ChildTask(
            role="frontend",
            module="megatron_runtime.server.frontend",
            options={**options.serialize(), "listen_fd": listening.fileno()},
            environment={"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")},
            inherited=(listening.fileno(),),
        ),
        on_report=lambda report: serving.set() if report.get("phase") == "Serving" else None,
    )
    KEPT.extend((kept, frontend))
    await frontend.start()
    await serving.wait()
    assert frontend.pid
    return Stand(frontend.pid, listening.getsockname()[1])


if __name__ == "__main__":
    serve(open_stand, "megatron-inference", "fastapi", "starlette", "uvicorn", "uvloop", "pyzmq")

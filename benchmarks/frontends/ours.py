"""Our frontend, started like by the launcher, with our coordinator and an engine without a model."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from coordinators.ours import TIMEOUT_SECONDS, serve_engines
from coordinators.processes import start_processes
from frontends.protocol import MODEL, TOKEN_TEXT, FrontendDeployment, serve
from frontends.tokenizer import write_tokenizer
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.server.listening_socket import bind
from megatron_runtime.server.options import FrontendOptions

KEPT: list[object] = []
"""Objects that must live as long as this process: the reader of a child, and temporary folders."""


async def deploy() -> FrontendDeployment:
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / "metrics").mkdir()
    _, address = await start_processes(
        DataParallelInferenceCoordinator.entrypoint,
        1,
        work=partial(serve_engines, engines=1, text_of_token=TOKEN_TEXT),
        engine_timeout=TIMEOUT_SECONDS,
    )
    listening = bind("127.0.0.1", 0, 0, flag="--port", may_move=False)
    options = FrontendOptions(address, str(folder), MODEL, max_sequence_length=4096)
    serving = asyncio.Event()
    frontend = Child(
        ChildTask(
            role="frontend",
            module="megatron_runtime.server.frontend",
            options=options.serialize(),
            environment={"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")},
            descriptors={"listen_fd": listening.fileno()},
        ),
        on_report=lambda report: serving.set() if report.get("phase") == "Serving" else None,
    )
    KEPT.extend((kept, frontend))
    await frontend.start()
    await serving.wait()
    assert frontend.pid
    return FrontendDeployment(frontend.pid, listening.getsockname()[1])


if __name__ == "__main__":
    serve(deploy, "megatron-inference", "fastapi", "starlette", "uvicorn", "uvloop", "pyzmq")

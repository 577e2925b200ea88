"""Our frontend as the launcher starts it, with our coordinator and an engine without a model behind it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinators.ours import PATIENT, serve_engines
from coordinators.processes import start_processes
from frontends.protocol import MODEL, SENTENCE, TOKEN_TEXT, Stand, serve
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.launch.child import Child, ChildTask
from megatron_runtime.server.http_server import bind
from megatron_runtime.server.options import FrontendOptions

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
KEPT: list[object] = []
"""What must last as long as this process: a child's readers end with it, and its files with their folder."""


def write_tokenizer(folder: Path) -> None:
    """Byte-level pairs that know the words of a prompt, with a chat template; token 1 is ``TOKEN_TEXT``."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [SENTENCE] * 2, trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=alphabet)
    )
    assert backend.decode([1]) == TOKEN_TEXT
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))


async def open_stand() -> Stand:
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    write_tokenizer(folder)
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

"""ONNX Runtime GenAI: one static batch with its generator; its own model builder creates the graph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai

from peers.protocol import Job, choose, serve


class Generator:
    def __init__(self, job: Job) -> None:
        _build(job.folder, job.work, choose(job.dtype, {"float32": "fp32"}))
        _set_threads(job.work / "genai_config.json", job.threads)
        self.model = onnxruntime_genai.Model(str(job.work))
        self.prompts = np.array(job.prompts, dtype=np.int32)

    def run(self, new_tokens: int) -> list[list[int]]:
        rows, given = self.prompts.shape
        params = onnxruntime_genai.GeneratorParams(self.model)
        length = given + new_tokens
        params.set_search_options(do_sample=False, batch_size=rows, max_length=length, min_length=length)
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(self.prompts)
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row)[given:].tolist() for row in range(rows)]


def _build(folder: Path, work: Path, precision: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
    subprocess.run([*builder, "-i", str(folder), "-o", str(work), "-c", str(work / "cache")], check=True)


def _set_threads(path: Path, threads: int) -> None:
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    serve(Generator, "onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers", "torch")

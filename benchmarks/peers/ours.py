"""Our engine in direct mode, in a process with the environment of the launcher's ranks."""

from __future__ import annotations

import os
import sys

from megatron_runtime.launch.tasks import compute_environment

if missing := compute_environment():
    # The C library and OpenMP read their variables when a process starts.
    os.execve(sys.executable, sys.orig_argv, os.environ | missing)

import torch

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams
from peers.protocol import Job, serve


class Ours:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.prompts = job.prompts
        config = InferenceConfig(
            kv_cache_memory_bytes=1 << 30, max_requests=len(job.prompts), max_sequence_length=job.length
        )
        model = load_model(job.folder, dtype=job.dtype, quantized_weights="keep")
        self.llm = MegatronLLM(model=model, tokenizer=load_tokenizer(job.folder), inference_config=config)

    def run(self, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, num_tokens_to_generate=new_tokens, ignore_eos=True)
        return [list(answer.generated_tokens) for answer in self.llm.generate(self.prompts, params)]


if __name__ == "__main__":
    serve(Ours, "megatron-inference", "torch")

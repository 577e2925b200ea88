"""transformers' ``generate`` with one static batch."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from peers.protocol import Job, serve


class StaticBatch:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.ids = torch.tensor(job.prompts)
        self.model = LlamaForCausalLM.from_pretrained(job.folder, dtype=getattr(torch, job.dtype)).eval()

    @torch.inference_mode()
    def run(self, new_tokens: int) -> list[list[int]]:
        answer = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return answer[:, self.ids.shape[1] :].tolist()


if __name__ == "__main__":
    serve(StaticBatch, "transformers", "torch")

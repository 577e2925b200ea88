"""The requests of the chaos tests, with the answers of an engine without failures."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from runtime_support.margin import least_margin
from transformers import AutoModelForCausalLM

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

LEAST_MARGIN = 1e-4
"""Minimum difference between the two largest scores. Rounding depends on the batch: over 100,000 tokens, some differ by
less than 2e-6."""
SPARE = 1.2
"""Candidates per job, because some are removed."""
LARGE_EVERY = 25
"""Every such job has a large body."""
BODY_BYTES = (100_000, 1_000_000)
"""Over HTTP, where it has a field that the server ignores."""
BAD_WORDS, BAD_WORD_BYTES = 16, 1000
"""Of the large bodies that engines get; longer than any answer, so that these words change none."""
PREFIX_TOKENS = 48


@dataclass(frozen=True)
class Job:
    """One request; greedy or seeded, streamed or not, over HTTP or through the library's client.

    Attributes:
        hasty: The client disconnects and sends the request again at once, several times.
        padding: Bytes of a field of the HTTP body that the server ignores.
        tokens: The answer.
        text: The same as text.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    stream: bool
    http: bool
    hasty: bool
    padding: int = 0
    tokens: Sequence[int] = ()
    text: str = ""

    @property
    def key(self) -> str | None:
        """The Idempotency-Key, if the request has one."""
        return f"job {self.number}" if self.hasty or self.number % 3 else None


def make_jobs(checkpoint: Path, rng: random.Random, count: int) -> list[Job]:
    """Jobs whose answers do not depend on rounding, numbered from 0."""
    candidates = [_candidate(number, rng) for number in range(round(count * SPARE))]
    config = InferenceConfig(kv_cache_memory_bytes=64 * 2**20)
    model, tokenizer = load_model(checkpoint, dtype="float32"), load_tokenizer(checkpoint)
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
        answers = llm.generate([job.prompt for job in candidates], [job.params for job in candidates])
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[Job] = []
    for job, answer in zip(candidates, answers, strict=True):
        tokens = list(answer.generated_tokens)
        if least_margin(reference, job.prompt, tokens, job.params) > LEAST_MARGIN:
            text = answer.generated_text or ""
            chosen.append(replace(_enlarged(job, rng), number=len(chosen), tokens=tokens, text=text))
    assert len(chosen) >= count
    return chosen[:count]


def _candidate(number: int, rng: random.Random) -> Job:
    """Every second job streams, every second pair uses HTTP, every second four are greedy."""
    params = SamplingParams(
        temperature=0.0 if number & 4 else rng.choice([0.7, 1.0]),
        seed=rng.randrange(2**32),
        num_tokens_to_generate=rng.randrange(100, 400),
        ignore_eos=True,
        streaming=bool(number & 1),
    )
    # Half of them have one of two common prefixes, by which a coordinator may route.
    prefix = [number & 16] * PREFIX_TOKENS if number & 8 else []
    prompt = prefix + [rng.randrange(256) for _ in range(rng.randrange(4, 60))]
    is_http = bool(number & 2)
    return Job(number, prompt, params, stream=bool(number & 1), http=is_http, hasty=is_http and number % 5 == 0)


def _enlarged(job: Job, rng: random.Random) -> Job:
    if job.number % LARGE_EVERY:
        return job
    params = SamplingParams.deserialize(job.params.serialize())
    words = ["".join(rng.choices(string.ascii_lowercase, k=BAD_WORD_BYTES)) for _ in range(BAD_WORDS)]
    params.add_attributes({"bad_words": words})
    return replace(job, params=params, padding=rng.choice(BODY_BYTES))

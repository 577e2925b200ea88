"""transformers with a model of the same sizes on the same device: ``generate``, and continuous batching."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu_checks.engine_speed import load_of, random_prompts
from gpu_checks.results import DEVICE, Check, Result, Sizes, free_memory
from gpu_checks.speed import wait

TIME_LIMIT = 40.0
"""Seconds after which no further measurement begins."""
LARGEST_BATCH = 128
SMALLEST_CONTINUOUS_BATCH = 32
NEW_TOKENS = (4, 24)
"""Decoding is measured from one number of new tokens to the other."""
REPEATS = 2
PAGE = 256
"""Tokens of a page of continuous batching, which is transformers' default; its parameter depends on the version."""
TOKENS_PER_PASS = 4096
"""Of continuous batching, whose mask has an element for each of them and each cached token."""
SPARE_PAGES = 2
"""As a multiple of those that the requests need: with few free ones, its scheduler delays new requests."""

Prompts = list[list[int]]


def checks(sizes: Sizes, rates: dict[int, float]) -> Iterator[Check]:
    """``rates`` are the tokens per second of this project's engine, by batch."""
    yield "transformers", partial(measure, sizes, rates)


def measure(sizes: Sizes, rates: dict[int, float]) -> Iterator[Result]:
    """Tokens per second of greedy decoding. What fails is named, and is no wrong result of this project."""
    try:
        import transformers

        name = f"transformers {importlib.metadata.version('transformers')}"
    except ImportError:
        yield Result("transformers", "not measured: it is not installed; pip install transformers")
        return
    free_memory(has_gpu=sizes.has_gpu)
    try:
        model = random_llama(transformers, sizes)
    except Exception as error:
        yield Result(name, not_measured(error))
        return
    load, ends_at = load_of(sizes), time.monotonic() + TIME_LIMIT
    batches = [batch for batch in load.batches if batch <= LARGEST_BATCH]
    large = [batch for batch in batches if batch >= SMALLEST_CONTINUOUS_BATCH] or batches[-1:]
    for kind, counts, work in (
        ("generate", batches, partial(static_seconds, model, sizes)),
        ("continuous batching", large, partial(continuous_seconds, transformers, model)),
    ):
        for batch in counts:
            title, prompts = f"{name}, {kind}, batch {batch}", random_prompts(batch, load.prompt, sizes.vocabulary)
            print(f"{title} ...", file=sys.stderr, flush=True)
            is_late = time.monotonic() > ends_at
            words = f"not measured: {TIME_LIMIT:g} s have passed" if is_late else compared(work, prompts, rates)
            yield Result(title, words)
            free_memory(has_gpu=sizes.has_gpu)


def compared(work: Callable[[Prompts], float], prompts: Prompts, rates: dict[int, float]) -> str:
    """The time of a token, and the rate of this project's engine as a multiple of the peer's."""
    try:
        took = work(prompts)
    except Exception as error:
        return not_measured(error)
    rate = len(prompts) / took
    words = f"{took * 1e3:.3g} ms a token, {rate:.4g} tokens/s"
    ours = rates.get(len(prompts))
    return words if ours is None else f"{words}; this engine: {ours / rate:.3g} times as many"


def not_measured(error: Exception) -> str:
    """The kind of the error and its first line."""
    words = str(error).strip().splitlines() or [""]
    return f"not measured: {type(error).__name__}: {words[0]:.80}"


def random_llama(transformers: Any, sizes: Sizes) -> Any:
    """Created on the device, or on the CPU without a GPU; the weights are normal, and 1 in norms."""
    fields = sizes.model
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")
    config = transformers.LlamaConfig(
        **{name: fields[name] for name in (*same, "max_position_embeddings", "tie_word_embeddings")},
        num_hidden_layers=fields["num_layers"],
        num_key_value_heads=fields["num_kv_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope_theta"]},
        initializer_range=0.02,
        eos_token_id=None,
    )
    with DEVICE if sizes.has_gpu else torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=sizes.dtype, attn_implementation="sdpa")
    wait(sizes)  # Continuous batching has a stream of its own.
    return model.eval()


def static_seconds(model: Any, sizes: Sizes, prompts: Prompts) -> float:
    """Of a token of each prompt in one batch: the difference of two lengths, the fastest of each after a warm-up."""
    ids = torch.tensor(prompts, device=model.device)
    fastest = []
    for count in NEW_TOKENS:
        found = []
        for _ in range(1 + REPEATS):
            wait(sizes)
            started = time.perf_counter()
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
            wait(sizes)
            found.append(time.perf_counter() - started)
            assert answer.shape == (len(prompts), ids.shape[1] + count), "an answer is too short"
        fastest.append(min(found[1:]))
    return (fastest[1] - fastest[0]) / (NEW_TOKENS[1] - NEW_TOKENS[0])


def continuous_seconds(transformers: Any, model: Any, prompts: Prompts) -> float:
    """Of a token of each prompt, while none of them is computed and none has ended, from the times of the tokens."""
    pages = len(prompts) * -(-(len(prompts[0]) + NEW_TOKENS[1]) // PAGE)
    settings = transformers.ContinuousBatchingConfig(
        num_blocks=(1 + SPARE_PAGES) * pages, max_batch_tokens=TOKENS_PER_PASS, allow_block_sharing=False
    )
    answers = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS[1], do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=settings,
        record_timestamps=True,
    ).values()
    if errors := [answer.error for answer in answers if answer.error is not None]:
        raise RuntimeError(errors[0])
    assert [len(answer.generated_tokens) for answer in answers] == [NEW_TOKENS[1]] * len(prompts), "too few tokens"
    times = [answer.timestamps for answer in answers]
    start, end = max(each[NEW_TOKENS[0] - 1] for each in times), min(each[-1] for each in times)
    assert start < end, "no token while all requests are decoding"
    count = sum(start < moment <= end for each in times for moment in each)
    return (end - start) * len(prompts) / count

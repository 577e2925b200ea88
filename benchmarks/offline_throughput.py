"""Output tokens per second of a whole offline job: ours beside a peer, in turn, in one run.

A random Llama of 110 million parameters, in float32 unless asked otherwise; 32 prompts of 128 tokens, 128 greedy tokens
each. Every job is a process of its own, told to take the same number of threads, and the contenders alternate, so that
a machine whose speed drifts slows both. What counts is the ratio of a pair; absolute figures hold for one machine only.

    python benchmarks/offline_throughput.py                      # ours beside transformers' generate
    python benchmarks/offline_throughput.py --pairs 5 --threads 2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 32, 128, 128, 32000


def prompts() -> list[list[int]]:
    """The same token ids for every contender."""
    return [[(7919 * row + 104729 * column) % VOCABULARY for column in range(PROMPT_TOKENS)] for row in range(PROMPTS)]


def write_checkpoint(folder: Path) -> None:
    """A random Llama, as transformers writes it, with a tokenizer that nobody asks for text."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2", "bos_token": "t1"}))


def run_ours(folder: Path, dtype: str) -> tuple[float, int]:
    """Seconds and output tokens of our engine, in direct mode."""
    from megatron_runtime.apis import MegatronLLM
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.model.checkpoint import load_model, load_tokenizer
    from megatron_runtime.sampling_params import SamplingParams

    model = load_model(folder, dtype=dtype)
    config = InferenceConfig(kv_cache_memory_bytes=1 << 30, max_requests=PROMPTS, max_sequence_length=512)
    params = SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, ignore_eos=True)
    warm = SamplingParams(temperature=0, num_tokens_to_generate=2, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=load_tokenizer(folder), inference_config=config) as llm:
        llm.generate(prompts(), warm)
        started = time.perf_counter()
        answers = llm.generate(prompts(), params)
        return time.perf_counter() - started, sum(len(answer.generated_tokens) for answer in answers)


def run_transformers(folder: Path, dtype: str) -> tuple[float, int]:
    """Seconds and output tokens of transformers' generate over one static batch."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor(prompts())
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, **options)
        started = time.perf_counter()
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, **options)
    return time.perf_counter() - started, (answer.shape[1] - PROMPT_TOKENS) * PROMPTS


CONTENDERS: dict[str, Callable[[Path, str], tuple[float, int]]] = {"ours": run_ours, "transformers": run_transformers}


def run_alone(name: str, folder: Path, threads: int, dtype: str) -> float:
    """Tokens per second of one contender in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--dtype", dtype]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, tokens = json.loads(done.stdout.splitlines()[-1])
    return float(tokens / seconds)


def main() -> None:
    """Measure pairs and print each, then the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=[name for name in CONTENDERS if name != "ours"], default="transformers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of every contender"
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.contender:
        print(json.dumps(CONTENDERS[chosen.contender](chosen.folder, chosen.dtype)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        ratios = []
        for pair in range(1, chosen.pairs + 1):
            ours, peer = (run_alone(name, Path(folder), chosen.threads, chosen.dtype) for name in ("ours", chosen.peer))
            ratios.append(ours / peer)
            print(
                f"pair {pair}: ours {ours:.0f} tokens/s, {chosen.peer} {peer:.0f} tokens/s, ratio {ours / peer:.2f}",
                flush=True,
            )
        print(
            f"median ratio ours / {chosen.peer}: {statistics.median(ratios):.2f} "
            f"({chosen.threads} threads, {chosen.dtype})"
        )


if __name__ == "__main__":
    main()

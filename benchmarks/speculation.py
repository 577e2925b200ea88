"""Decoding with drafts from the prompt or of a draft model, compared with the same engine without them, on a CPU.

Each pair runs one after the other, and the answers must be equal; absolute numbers apply to one machine only. With one
thread, times are those of the processor, so that other load matters less.

    python benchmarks/speculation.py                      # SmolLM2, one request at a time
    python benchmarks/speculation.py --requests 8 --drafts 3
    python benchmarks/speculation.py --draft-model self       # drafts that are all right
    python benchmarks/speculation.py --draft-model layers:2   # of the first two layers of the model
    python benchmarks/speculation.py --draft-model copies     # of a small Llama that continues copies
    python benchmarks/speculation.py --draft-model PATH
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from copying_llama import write_copying_llama
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.launch.sample_model import MODEL, models_folder
from megatron_runtime.model.checkpoint import fill, load_model, load_tokenizer, open_checkpoint
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from peers.command_line import positive, print_table
from peers.turns import ratio_cells, run_in_turn

LICENSE = Path(__file__).parent.parent / "LICENSE"
JOBS = {
    "repeats its prompt, greedy": (True, {"temperature": 0.0}),
    "repeats its prompt, sampled": (True, {"temperature": 0.7, "top_p": 0.9, "seed": 1}),
    "repeats nothing, sampled": (False, {"temperature": 1.2, "seed": 2}),
}
"""Whether the prompt has the text twice, so that the model continues the copy, and sampling parameters."""


def main() -> None:
    """Run all jobs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=models_folder() / MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=1, help="at the same time")
    parser.add_argument("--excerpt", type=positive, default=700, help="tokens of the text that the answer repeats")
    parser.add_argument("--new", type=positive, default=200, help="tokens of an answer")
    parser.add_argument("--drafts", type=positive, default=7, help="num_speculative_tokens")
    parser.add_argument("--draft-model", help="a path, self, layers:N, or copies; default: prompt lookup")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    clock = time.perf_counter if chosen.threads > 1 else time.process_time
    model, tokenizer = load_model(chosen.model, dtype=chosen.dtype), load_tokenizer(chosen.model)
    engines = {drafts: make_engine(chosen, model, tokenizer, drafts, clock) for drafts in (chosen.drafts, 0)}
    text = tokenizer.tokenize(LICENSE.read_text(encoding="utf-8"))
    rows = [["answer", "speed with drafts / without", "of the pairs", "drafts that were right"]]
    for name, (repeats, sampling) in JOBS.items():
        # The copy begins at another place for each request.
        excerpts = [text[8 * index : 8 * index + chosen.excerpt] for index in range(chosen.requests)]
        prompts = [part + part[: chosen.excerpt // 4] if repeats else part for part in excerpts]
        params = SamplingParams(num_tokens_to_generate=chosen.new, ignore_eos=True, **sampling)
        before = engines[chosen.drafts].stats()

        def run(drafts: int, _: int, prompts: list[list[int]] = prompts, params: SamplingParams = params) -> object:
            engines[drafts].generate(prompts, SamplingParams(num_tokens_to_generate=1))  # caches the prompt
            started = clock()
            answers = engines[drafts].generate(prompts, params)
            return clock() - started, [answer.merge().generated_tokens for answer in answers]

        ours, plain = run_in_turn([*engines], chosen.pairs + 1, run).values()
        assert all(our[1] == base[1] for our, base in zip(ours, plain, strict=True)), "the answers differ"
        ratios = [base[0] / our[0] for our, base in zip(ours[1:], plain[1:], strict=True)]
        after = engines[chosen.drafts].stats()
        drafted = after.draft_tokens_total - before.draft_tokens_total
        right = after.accepted_draft_tokens_total - before.accepted_draft_tokens_total
        rows.append([name, *ratio_cells(ratios), f"{right} of {drafted}"])
    print_table(rows)


def make_engine(
    chosen: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, drafts: int, clock: Callable[[], float]
) -> DynamicInferenceEngine:
    """An engine with this number of drafts."""
    config = InferenceConfig(
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        num_speculative_tokens=drafts,
        speculative_draft_model=draft_model(chosen, model) if drafts else None,
    )
    engine = DynamicInferenceEngine.build(model, tokenizer, config)
    engine.context.clock = clock
    return engine


def draft_model(chosen: argparse.Namespace, model: Decoder) -> Decoder | None:
    """The draft model of the command line."""
    if chosen.draft_model in (None, "self"):
        return model if chosen.draft_model else None
    if chosen.draft_model == "copies":
        assert model.embedding is not None, "the model is whole"
        with TemporaryDirectory() as folder:
            write_copying_llama(Path(folder), model.embedding.table, model.config.max_position_embeddings)
            return load_model(folder, dtype=chosen.dtype)
    kind, _, layers = chosen.draft_model.partition(":")
    if kind != "layers":
        return load_model(chosen.draft_model, dtype=chosen.dtype)
    config, source, rotary_factors = open_checkpoint(chosen.model)
    draft = Decoder(replace(config, num_layers=int(layers)), dtype=model.dtype)
    fill(draft, source, rotary_factors, check_finite=False)
    draft.prepare()
    return draft.eval()


if __name__ == "__main__":
    main()

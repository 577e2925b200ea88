"""Generates text for a list of prompts, with the options of Megatron's example of offline inference.

Usage: ``python examples/offline_inference.py --load MODEL --prompts "Water boils at"``, or on several ranks ``torchrun
--nproc-per-node 4 examples/offline_inference.py --load MODEL --tensor-model-parallel-size 2 --use-coordinator``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_runtime.apis import (
    DynamicInferenceRequest,
    MegatronAsyncLLM,
    MegatronLLM,
    ParallelSizes,
    SamplingParams,
    join_world,
)
from megatron_runtime.model.checkpoint import load_model, load_tokenizer


def main() -> None:
    """Runs on every rank; with a coordinator only the primary rank generates, and in direct mode every rank."""
    options = _parse()
    sizes = ParallelSizes(
        tensor=options.tensor_model_parallel_size,
        pipeline=options.pipeline_model_parallel_size,
        expert=options.expert_model_parallel_size,
    )
    with closing(join_world(sizes)) as ranks:
        parts = {
            "model": load_model(options.load, dtype=options.dtype, ranks=ranks),
            "tokenizer": load_tokenizer(options.load),
            "use_coordinator": options.use_coordinator,
            "coordinator_host": options.coordinator_host,
            "coordinator_port": options.coordinator_port,
        }
        requests = asyncio.run(_generate_async(parts, options)) if options.async_mode else _generate(parts, options)
        if ranks.position.is_first and requests:
            _report(requests, options.output_path)


def _generate(parts: dict[str, Any], options: argparse.Namespace) -> list[DynamicInferenceRequest]:
    requests: list[DynamicInferenceRequest] = []
    with MegatronLLM(**parts) as llm:
        if llm.is_primary_rank:
            for _ in range(options.inference_repeat_n):
                requests = llm.generate(_prompts(options), _sampling_params(options))
    return requests


async def _generate_async(parts: dict[str, Any], options: argparse.Namespace) -> list[DynamicInferenceRequest]:
    requests: list[DynamicInferenceRequest] = []
    async with MegatronAsyncLLM(**parts) as llm:
        if llm.is_primary_rank:
            for _ in range(options.inference_repeat_n):
                requests = await llm.generate(_prompts(options), _sampling_params(options))
    return requests


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompt_file is None:
        return list(options.prompts)
    lines = [json.loads(line)["text"] for line in options.prompt_file.read_text().splitlines()]
    return lines[: options.prompt_file_num_truncate]


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p or 1.0,
        return_log_probs=options.return_log_probs,
        skip_prompt_log_probs=options.skip_prompt_log_probs,
        num_tokens_to_generate=options.num_tokens_to_generate,
        termination_id=options.termination_id,
        top_n_logprobs=options.top_n_logprobs,
        stop_words=options.stop_words,
    )


def _report(requests: Sequence[DynamicInferenceRequest], path: Path | None) -> None:
    for request in requests:
        print(f"{request.prompt}{request.generated_text}")
    if path is not None:
        results = {
            str(number): {
                "input_prompt": request.prompt,
                "generated_text": request.generated_text,
                "generated_tokens": request.generated_tokens,
                "logprobs": [*(request.prompt_log_probs or []), *(request.generated_log_probs or [])],
                "latency": request.latency,
            }
            for number, request in enumerate(requests)
        }
        path.write_text(json.dumps(results, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, help="folder or file of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    for kind in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{kind}-model-parallel-size", type=int, default=1)
    parser.add_argument("--use-coordinator", action="store_true", help="required for several replica groups")
    parser.add_argument("--coordinator-host")
    parser.add_argument("--coordinator-port", type=int)
    parser.add_argument("--async-mode", action="store_true", help="use MegatronAsyncLLM; requires --use-coordinator")
    parser.add_argument("--prompts", nargs="+", default=["Water boils at", "The capital of France is"])
    parser.add_argument("--prompt-file", type=Path, help="a JSON object with a text per line; replaces --prompts")
    parser.add_argument("--prompt-file-num-truncate", type=int, help="number of lines to use; default: all")
    parser.add_argument("--num-tokens-to-generate", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=1)
    parser.add_argument("--top_p", type=float, default=0.0, help="0: no nucleus sampling")
    parser.add_argument("--return-log-probs", action="store_true")
    parser.add_argument("--skip-prompt-log-probs", action="store_true")
    parser.add_argument("--top-n-logprobs", type=int, default=0)
    parser.add_argument("--stop-words", nargs="+")
    parser.add_argument("--termination-id", type=int, help="default: the tokenizer's end of text")
    parser.add_argument("--output-path", type=Path, help="JSON file for the results")
    parser.add_argument("--inference-repeat-n", type=int, default=1, help="generate this number of times")
    options = parser.parse_args()
    if options.async_mode and not options.use_coordinator:
        parser.error("--async-mode requires --use-coordinator")
    return options


if __name__ == "__main__":
    main()

"""Generates text on the ranks that torchrun starts, as one or several replica groups.

Usage: ``torchrun --nproc-per-node 4 examples/generate.py MODEL --tensor-parallel 2 --prompt "Water boils at"``.
"""

from __future__ import annotations

import argparse
from contextlib import closing

from megatron_runtime.apis import MegatronLLM, ParallelSizes, join_world
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams


def main() -> None:
    """Runs on every rank; only the primary rank generates and prints."""
    options = _parse()
    sizes = ParallelSizes(
        tensor=options.tensor_parallel, pipeline=options.pipeline_parallel, expert=options.expert_parallel
    )
    params = SamplingParams(temperature=0, num_tokens_to_generate=options.num_tokens_to_generate)
    with closing(join_world(sizes)) as ranks:
        model = load_model(options.model, dtype=options.dtype, ranks=ranks)
        with MegatronLLM(model=model, tokenizer=load_tokenizer(options.model), use_coordinator=True) as llm:
            if llm.is_primary_rank:
                for request in llm.generate(options.prompt, params):
                    print(f"{request.prompt}{request.generated_text}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint's folder or file")
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument("--num-tokens-to-generate", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    for kind in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{kind}-parallel", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""An OpenAI endpoint from the library: one process, or the ranks that torchrun starts.

Usage: ``python examples/inference_server.py MODEL --port 5000``, or
``torchrun --nproc-per-node 4 examples/inference_server.py MODEL --tensor-parallel 2``. Ctrl-C or SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import closing

from megatron_runtime.apis import MegatronLLM, ParallelSizes, ServeConfig, join_world
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer


def main() -> None:
    """Every rank serves its part of the model; the primary rank also runs the coordinator and the HTTP frontends."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sizes = ParallelSizes(
        tensor=options.tensor_parallel, pipeline=options.pipeline_parallel, expert=options.expert_parallel
    )
    config = ServeConfig(
        host=options.host,
        port=options.port,
        parsers=options.parsers,
        verbose=options.verbose,
        frontend_replicas=options.frontend_replicas,
        served_name=options.served_name,
    )
    with closing(join_world(sizes)) as ranks:
        model = load_model(options.model, dtype=options.dtype, ranks=ranks)
        with MegatronLLM(
            model=model,
            tokenizer=load_tokenizer(options.model),
            inference_config=InferenceConfig(buffer_size_gb=options.buffer_size_gb),
            use_coordinator=True,
        ) as llm:
            llm.serve(config, blocking=False)
            if llm.frontend_address is not None:
                print("Serving on http://{}:{}/v1".format(*llm.frontend_address), flush=True)
            llm.wait_for_shutdown()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint's folder or file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--parsers", nargs="*", default=[], help="names of reasoning and tool call parsers")
    parser.add_argument("--verbose", action="store_true", help="log every request")
    parser.add_argument("--frontend-replicas", type=int, default=1)
    parser.add_argument("--served-name", default="model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--buffer-size-gb", type=float, default=1.0, help="memory of each rank's KV cache")
    for kind in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{kind}-parallel", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What only a GPU can show: whether the kernels and the engine compute the right thing on it, and how fast.

Kernels in every type against float64 or the CPU, the bits of a request in several batches, the engine's tokens against
those of the CPU, and the memory that a suspended engine gives back. With random weights of a Llama-3.1-8B, the speed of
passes as a share of what this device can do, the time of the engine's steps, and transformers beside it; and the speed
of passes of the same model with matrices or a KV cache in fp8, and of a Qwen3-30B-A3B. A whole server: its speed over
HTTP, the memory that it gives back, and its answers after its rank is killed. On a machine with several GPUs: tensor
parallel ranks, and a killed one. Prints one table; exits with 1 if a result is wrong. Needs no network.

    python benchmarks/gpu.py                 # or: make gpu
    python benchmarks/gpu.py --dry-run       # or: make gpu-dry; toy sizes, on tensors that only say they are on a GPU
    python benchmarks/gpu.py --only steps    # the checks with this word in their names
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_SECONDS = 8 * 60
"""That all of it is meant to take on one H100."""
TESTS = Path(__file__).parent.parent / "tests" / "runtime"


def main() -> int:
    """0, or 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: toy sizes, and times that say nothing")
    parser.add_argument("--only", default="", metavar="WORD", help="run the checks with this word in their names")
    given = parser.parse_args()
    is_dry: bool = given.dry_run
    sys.path[:0] = [str(TESTS), str(TESTS / "gpu")]  # their cases are also those of this program
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before the import of Triton
        with dry_device():
            return report(is_dry, given.only)
    import torch

    if not torch.cuda.is_available():
        print(f"error: PyTorch {torch.__version__} finds no GPU; use --dry-run without one", file=sys.stderr)
        return 1
    return report(is_dry, given.only)


def report(is_dry: bool, word: str = "", without: str | None = None) -> int:
    """Run all checks and measurements with this word in their names, and not with the other one, and print them."""
    from gpu_checks import (
        correctness,
        engine_speed,
        features,
        flashinfer,
        float8_cache,
        float8_weights,
        memory,
        mixtures,
        prompt_steps,
        server,
        several_gpus,
        speed,
        transformers_speed,
    )
    from gpu_checks.results import REAL, TOY, device_name, print_results, run

    sizes, begun = TOY if is_dry else REAL, time.monotonic()
    print(f"device: {'none; this is a dry run, whose times say nothing' if is_dry else device_name()}\n")
    rates: dict[int, float] = {}
    checks = [
        *correctness.checks(sizes),
        *features.checks(sizes),
        *mixtures.checks(sizes),
        *float8_weights.checks(sizes),
        *float8_cache.checks(sizes),
        *memory.checks(sizes),
        *speed.checks(sizes),
        *flashinfer.checks(sizes),
        *prompt_steps.checks(sizes),
        *float8_weights.measurements(sizes),
        *float8_cache.measurements(sizes),
        *engine_speed.checks(sizes, rates),
        *transformers_speed.checks(sizes, rates),
        *mixtures.measurements(sizes),
        *server.checks(sizes),
        *several_gpus.checks(sizes),
    ]
    chosen = [check for check in checks if word in check[0] and (without is None or without not in check[0])]
    results = [*run(chosen)]
    print_results(results)
    print(f"\n{duration(time.monotonic() - begun, is_dry=is_dry)}")
    wrong = [result.name for result in results if result.is_wrong]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def duration(seconds: float, *, is_dry: bool) -> str:
    """How long it took, and whether that is longer than it should, which is no wrong result."""
    minutes, rest = divmod(round(seconds), 60)
    words = f"time in all: {minutes} min {rest} s"
    is_long = seconds > MOST_SECONDS and not is_dry
    return f"{words}, more than the {MOST_SECONDS // 60} minutes that all of it should take" if is_long else words


@contextmanager
def dry_device() -> Iterator[None]:
    """The pretended device of the tests, as a GPU of compute capability 9.0."""
    import numpy as np
    from gpu_support.pretended import load_device_guard, pretended_device
    from gpu_support.quick_interpreter import quick_interpreter

    from megatron_runtime.gpu import launch

    with tempfile.TemporaryDirectory() as folder:
        load_device_guard(Path(folder))
    launch._capability = lambda _: 90
    with np.errstate(over="ignore"), quick_interpreter(), pretended_device():
        yield


if __name__ == "__main__":
    sys.exit(main())

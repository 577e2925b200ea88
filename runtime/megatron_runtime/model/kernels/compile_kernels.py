"""Compiles the kernels of a CPU ahead: ``python -m megatron_runtime.model.kernels.compile_kernels FOLDER``.

They serve processors like this one, and a package that lies where this one lies. Numba's cache holds pickles: write
access to FOLDER is the right to change what the ranks do.
"""

from __future__ import annotations

import argparse
import os

CACHE_VARIABLE = "NUMBA_CACHE_DIR"
"""Where numba looks for compiled kernels, and puts those that it compiles. It uses no folder that it can't write to."""
DTYPES = ("bfloat16", "float32")


def main() -> None:
    """Compiles what models of these head dimensions and types need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the kernels go; made if it is not there")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], help="of the models to be served")
    parser.add_argument(
        "--latent-dim",
        type=int,
        nargs=2,
        metavar=("KV_LORA_RANK", "QK_ROPE_HEAD_DIM"),
        help="of a model with multi-head latent attention",
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="of their weights in memory")
    chosen = parser.parse_args()
    os.environ[CACHE_VARIABLE] = chosen.folder
    # Not above: numba reads the variable when it is imported.
    import torch

    from megatron_runtime.model.cache_layout import CacheLayout
    from megatron_runtime.model.kernels import cpu_attention, row_kernels

    for name in chosen.dtype:
        dtype = getattr(torch, name)
        row_kernels.prepare(dtype)
        for head_dim in chosen.head_dim:
            cpu_attention.prepare(CacheLayout(1, 1, head_dim, head_dim), dtype)
        if chosen.latent_dim is not None:
            rank, rotated = chosen.latent_dim
            cpu_attention.prepare(CacheLayout(1, 1, rank + rotated, rank, values_in_keys=True), dtype)


if __name__ == "__main__":
    main()

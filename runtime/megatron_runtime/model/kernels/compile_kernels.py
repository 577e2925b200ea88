"""Compiles the kernels of a CPU in advance: ``python -m megatron_runtime.model.kernels.compile_kernels FOLDER``.

They are valid for the same kind of processor and the same sources of the package, at any path. Numba's cache contains
pickles, so that write access to FOLDER allows to change the code that ranks execute.
"""

from __future__ import annotations

import argparse
import os

CACHE_VARIABLE = "NUMBA_CACHE_DIR"
"""Folder of numba's compiled kernels. Numba does not use a folder without write access."""
DTYPES = ("bfloat16", "float32")


def main() -> None:
    """Compile the kernels for models with these head dimensions and dtypes."""
    chosen = _options()
    os.environ[CACHE_VARIABLE] = chosen.folder
    # Imported here because numba reads the variable at import.
    import torch

    from megatron_runtime.model.cache_layout import CacheLayout
    from megatron_runtime.model.formats.coded_rows import CODINGS
    from megatron_runtime.model.kernels import (
        adapter_kernel,
        cpu_attention,
        delta_kernels,
        mamba_kernels,
        quantized_products,
        row_kernels,
        stored_blocks,
        tile_products,
        vector_products,
    )
    from megatron_runtime.model.kernels.kernel_compiler import compile_in_this_process

    compile_in_this_process()
    for is_chosen, kernels in ((chosen.gated_delta, delta_kernels), (chosen.mamba, mamba_kernels)):
        if is_chosen:
            kernels.prepare()
    for kind in chosen.quantization:
        stored_blocks.prepare(kind)
    for name in chosen.dtype:
        dtype = getattr(torch, name)
        row_kernels.prepare(dtype)
        adapter_kernel.prepare(dtype)
        tile_products.prepare(dtype)
        vector_products.prepare(dtype)
        for head_dim in chosen.head_dim:
            cpu_attention.prepare(CacheLayout(1, 1, head_dim, head_dim), dtype)
        for kind in chosen.quantization:
            quantized_products.prepare(CODINGS[kind], dtype)
        if chosen.latent_dim is not None:
            rank, rotated = chosen.latent_dim
            cpu_attention.prepare(CacheLayout(1, 1, rank + rotated, rank, values_in_keys=True), dtype)


def _options() -> argparse.Namespace:
    # Imported here, because processes that only need the name of the variable start faster without it.
    from megatron_runtime.model.formats.coded_rows import CODINGS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="output folder; created if it does not exist")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], help="of the models to be served")
    parser.add_argument(
        "--latent-dim",
        type=int,
        nargs=2,
        metavar=("KV_LORA_RANK", "QK_ROPE_HEAD_DIM"),
        help="of a model with multi-head latent attention",
    )
    parser.add_argument("--gated-delta", action="store_true", help="for a model with gated delta layers")
    parser.add_argument("--mamba", action="store_true", help="for a model with Mamba-2 layers")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="of their weights in memory")
    parser.add_argument("--quantization", choices=CODINGS, nargs="+", default=[], help="of their GGUF files")
    return parser.parse_args()


if __name__ == "__main__":
    main()

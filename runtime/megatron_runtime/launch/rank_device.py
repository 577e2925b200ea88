"""The device that a rank computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_runtime.errors import ConfigurationError, EngineError
from megatron_runtime.launch.rank_options import RankOptions

if TYPE_CHECKING:
    import torch

_REMEDY = "end the programs that use this GPU (nvidia-smi lists them), or give the pod one that no other program uses"


def choose_device(options: RankOptions) -> torch.device:
    """The device of this rank. A GPU becomes the current device of this thread, as NCCL needs it.

    Raises:
        ConfigurationError: PyTorch has no CUDA, or the GPU has no memory for a CUDA context.
        EngineError: There are fewer GPUs than ranks.
    """
    import torch

    from megatron_runtime.model.device_memory import naming_device_memory

    if options.engine.device == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigurationError(
            f"--device cuda: PyTorch {torch.__version__} was built without CUDA; install a build with it, or use "
            "--device cpu"
        )
    index, count = options.local_rank, torch.cuda.device_count()
    if index >= count:  # may differ on another machine or later: not bad input
        raise EngineError(
            f"--device cuda: each rank needs its own GPU, this one number {index} counted from 0, but "
            f"PyTorch finds {count}; give the pod a GPU for each of its ranks"
        )
    device = torch.device("cuda", index)
    with naming_device_memory("when it was initialized", device, remedy=_REMEDY):
        torch.cuda.set_device(device)
    return device

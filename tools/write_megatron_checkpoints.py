"""Writes the ``torch_dist`` checkpoints in ``tests/runtime/data/megatron`` and their logits, with Megatron itself.

Requires Python 3.11 with ``torch==2.13.0`` for the CPU, ``megatron-core==0.16.1``, ``numpy``, ``einops``, ``psutil``
and ``safetensors`` in a separate environment: the project and its tests do not need Megatron. Needs no accelerator;
calls to one are redirected to the CPU. `python tools/write_megatron_checkpoints.py` writes all of them in about two
minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")  # about missing packages, at every import
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.optimizer import FP32Optimizer  # noqa: E402
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron_cases import CASES, GPT2, PADDED_VOCABULARY, VOCABULARY, Case  # noqa: E402

moe_utils.te_general_gemm = None  # used, but only defined with Transformer Engine
for of_transformer_engine in ("TELinear", "TEColumnParallelLinear"):
    # Without Transformer Engine they are None, which isinstance() rejects.
    setattr(multi_latent_attention, of_transformer_engine, type(of_transformer_engine, (), {}))

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "runtime" / "data" / "megatron"
TOKENS = [(7 * place + 3) % VOCABULARY for place in range(24)]
ITERATION = 10


class OnTheCpu(TorchFunctionMode):
    """Creates on the CPU the tensors that Megatron creates on an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class PlainAttention(torch.nn.Module):
    """Replaces the kernels of Transformer Engine: Megatron's own attention requires keys as wide as values."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[tokens, batch, heads, width] each to [tokens, batch, heads * width of a value]."""
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        shares = scores.masked_fill(attention_mask, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", shares, value).flatten(2)


def transformer_config(case: Case) -> TransformerConfig:
    settings = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 4,
        "ffn_hidden_size": 24,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "init_method_std": 0.2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": case.tensor_ranks,
        "expert_model_parallel_size": case.expert_ranks,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    kind = MLATransformerConfig if "kv_lora_rank" in case.transformer else TransformerConfig
    return kind(**(settings | case.transformer))


def build(case: Case) -> GPTModel:
    """The model with random weights, including norms and biases."""
    torch.manual_seed(1)
    config = transformer_config(case)
    if isinstance(config.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    if config.multi_latent_attention:
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
    learned = case.hugging_face is GPT2
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="learned_absolute" if learned else "rope",
        share_embeddings_and_output_weights=learned or case.hugging_face["tie_word_embeddings"],
        rotary_base=10000,
        rotary_percent=case.hugging_face.get("partial_rotary_factor", 1.0),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            split = case.ranks > 1 and (".local_experts." in name or name.endswith("linear_qkv.bias"))
            if split or parameter.ndim == 1:
                both = 0.2 * torch.randn(case.ranks, *parameter.shape)
                parameter += both[dist.get_rank() if split else 0]
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer += 0.2 * torch.randn(buffer.shape)
    return model


def logits(model: GPTModel) -> Tensor:
    """Logits of `TOKENS`, [tokens, padded vocabulary]."""
    count = len(TOKENS)
    mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
    found = model(torch.tensor([TOKENS]), torch.arange(count)[None], mask)
    return gather_from_tensor_model_parallel_region(found)[0]


def beside_the_model(model: GPTModel, state: dict[str, Any]) -> dict[str, Any]:
    """The state that Megatron's training saves in addition to the model's ``state``, after one step."""
    config = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0, log_num_zeros_in_grad=False)
    adam = torch.optim.AdamW(model.parameters(), lr=config.lr)
    with OnTheCpu():
        optimizer = FP32Optimizer(adam, config, lambda _: None)
    logits(model).square().mean().backward()
    for parameter in model.parameters():
        parameter.main_grad = parameter.grad
    optimizer.step()
    settings = {"iteration": ITERATION, "tensor_model_parallel_size": 1, "ckpt_format": "torch_dist"}
    random = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()[:16]}]
    return {
        "args": argparse.Namespace(**settings, padded_vocab_size=PADDED_VOCABULARY),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 1e9,
        "optimizer": optimizer.sharded_state_dict(state),
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": ITERATION},
        "rng_state": ShardedObject("rng_state", random, (1, 1), (0, 0), replica_id=0),
        "rerun_state_machine": {"mode": "disabled"},
    }


def write(case: Case, folder: Path) -> None:
    """Writes the checkpoint into ``folder``, with Hugging Face's configuration and the logits."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor_ranks, expert_model_parallel_size=case.expert_ranks
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    model = build(case)
    to = folder / f"iter_{ITERATION:07d}" if case.training else folder
    to.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {}
    if case.training:
        state |= beside_the_model(model, model.sharded_state_dict(metadata=case.metadata))
    state["model"] = model.sharded_state_dict(metadata=case.metadata)
    dist_checkpointing.save(state, str(to), content_metadata=case.metadata)
    with torch.no_grad():
        found = logits(model.eval())
    if dist.get_rank() == 0:
        if case.training:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        (folder / "config.json").write_text(json.dumps(case.hugging_face, indent=1) + "\n")
        expected = {"tokens": torch.tensor(TOKENS), "logits": found[:, :VOCABULARY].float().contiguous()}
        save_file(expected, folder / "expected.safetensors")


def main() -> None:
    """Writes all checkpoints. It starts itself with arguments for each rank of a checkpoint."""
    if len(sys.argv) > 1:
        name, rank = sys.argv[1], int(sys.argv[2])
        rendezvous = f"file://{Path.cwd()}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=CASES[name].ranks)
        write(CASES[name], Path("checkpoint"))
        dist.barrier()
        dist.destroy_process_group()
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        with TemporaryDirectory() as scratch:
            command = [sys.executable, Path(__file__).resolve(), name]
            # A relative path, because Megatron stores it in the checkpoint.
            ranks = [subprocess.Popen([*command, str(rank)], cwd=scratch) for rank in range(case.ranks)]
            ended = [rank.wait() for rank in ranks]
            if any(ended):
                sys.exit(f"{name}: the ranks exited with {ended}")
            shutil.make_archive(str(FOLDER / name), "zip", Path(scratch) / "checkpoint")


if __name__ == "__main__":
    main()

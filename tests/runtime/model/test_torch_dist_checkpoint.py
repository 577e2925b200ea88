"""Megatron's ``torch_dist`` folders, written by torch.distributed.checkpoint: the same model, no code executed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.megatron_checkpoint import megatron_state, save
from runtime_support.reference_models import CLOSE, EXPERTS, logits_of

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model


def assert_same_logits(folder: Path, model: Any, paged_requests: Any) -> None:
    tokens = list(range(1, 40))
    ours = paged_requests(load_model(folder, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


@pytest.mark.parametrize("layout", ["stacked", "layers apart", "all apart"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Phi3", {}),
        ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
        ("Qwen3Moe", EXPERTS),
    ],
    ids=["llama", "tied", "qwen2", "qwen3", "phi3", "mixtral", "qwen3 moe"],
)
def test_a_megatron_checkpoint_has_the_logits_of_the_original(
    family: str, changes: dict[str, Any], layout: str, tmp_path: Path, paged_requests: Any, random_model: Any
) -> None:
    model = random_model(family, **changes)
    save(tmp_path, model, megatron_state(model, layout))
    assert_same_logits(tmp_path, model, paged_requests)


def test_gpt_2_in_megatron_s_arrangement_has_the_logits_of_the_original(
    tmp_path: Path, paged_requests: Any, random_model: Any
) -> None:
    model = random_model("GPT2")
    body = model.transformer
    state = {
        "embedding.word_embeddings.weight": body.wte.weight.detach(),
        "embedding.position_embeddings.weight": body.wpe.weight.detach(),
        "decoder.final_layernorm.weight": body.ln_f.weight.detach(),
        "decoder.final_layernorm.bias": body.ln_f.bias.detach(),
    }
    layers: list[dict[str, torch.Tensor]] = []
    for block in body.h:
        qkv = block.attn.c_attn
        per_head = [part.view(4, 8, -1) for part in qkv.weight.detach().t().chunk(3)]
        bias_per_head = [part.view(4, 8) for part in qkv.bias.detach().chunk(3)]
        layer = {
            "self_attention.linear_qkv.weight": torch.cat(per_head, 1).flatten(0, 1),
            "self_attention.linear_qkv.bias": torch.cat(bias_per_head, 1).flatten(),
        }
        matrices = {
            "self_attention.linear_proj.": block.attn.c_proj,
            "mlp.linear_fc1.": block.mlp.c_fc,
            "mlp.linear_fc2.": block.mlp.c_proj,
        }
        norms = {"self_attention.linear_qkv.layer_norm_": block.ln_1, "mlp.linear_fc1.layer_norm_": block.ln_2}
        layer |= {f"{name}weight": part.weight.detach().t().contiguous() for name, part in matrices.items()}
        layer |= {f"{name}weight": part.weight.detach() for name, part in norms.items()}
        layer |= {f"{name}bias": part.bias.detach() for name, part in (matrices | norms).items()}
        layers.append(layer)
    stacked = {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    save(tmp_path, model, state | stacked)
    assert_same_logits(tmp_path, model, paged_requests)


def test_the_state_of_the_optimizer_is_ignored(tmp_path: Path, paged_requests: Any, random_model: Any) -> None:
    model = random_model("Llama")
    state = megatron_state(model)
    training = {
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(61, 32),
        "decoder.layers.mlp.linear_fc1._extra_state": b"anything",
        "rng_state": {"seed": 1},
    }
    save(tmp_path, model, state | training)
    assert_same_logits(tmp_path, model, paged_requests)


@pytest.mark.parametrize(
    ("family", "changes", "axis"),
    [("Llama", {}, 1), ("Llama", {}, 0), ("Qwen3Moe", EXPERTS, 1)],
    ids=["tensor parallel", "pipeline parallel", "expert parallel"],
)
def test_a_checkpoint_of_two_ranks_is_joined(
    family: str, changes: dict[str, Any], axis: int, tmp_path: Path, paged_requests: Any, random_model: Any
) -> None:
    model = random_model(family, **changes)
    torch.save(megatron_state(model), tmp_path / "state.pt")
    script = """
        import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        folder, axis, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        state = torch.load(f"{folder}/state.pt")
        dim = {name: axis if name.startswith("decoder.layers") else 0 for name in state}
        shards = {name: distribute_tensor(tensor, mesh, [Shard(dim[name])]) for name, tensor in state.items()}
        dcp.save(shards, checkpoint_id=f"{folder}/checkpoint")
        dist.barrier()  # else a rank may leave while the other still hears of it
        dist.destroy_process_group()
        os._exit(0)  # destructors of gloo's threads have aborted a process that was done
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(axis)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    folder = tmp_path / "checkpoint"
    assert len(list(folder.glob("*.distcp"))) == 2
    model.config.save_pretrained(folder)
    assert_same_logits(folder, model, paged_requests)


class Intruder:
    """A pickle that executes code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_code_in_a_tensor_is_not_executed(tmp_path: Path, random_model: Any) -> None:
    model = random_model("Llama")
    save(tmp_path, model, megatron_state(model))
    (data,) = tmp_path.glob("*.distcp")
    torch.save(Intruder(tmp_path / "touched"), data)
    with pytest.raises(CheckpointError, match=r"\.distcp: tensor .* can't be read"):
        load_model(tmp_path, dtype="float32")
    assert not (tmp_path / "touched").exists()


def test_a_mismatch_with_the_configuration_is_reported(tmp_path: Path, random_model: Any) -> None:
    model = random_model("Llama")
    state = megatron_state(model)
    cases = {
        "missing": (dict(state), "tensor model.norm.weight missing"),
        "extra": (state | {"decoder.surprise": torch.ones(2)}, "tensor decoder.surprise found that the configuration"),
        "short": (state | {"output_layer.weight": torch.ones(50, 32)}, r"output_layer.weight has shape \[50, 32\]"),
        "long": (
            state | {"decoder.final_layernorm.weight": torch.ones(33)},
            r"decoder.final_layernorm.weight has shape \[33\], but the configuration expects 32",
        ),
        "layers": (
            state | {"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 32, 48)},
            "decoder.layers.mlp.linear_fc2.weight has 2 layers, but the configuration expects 3",
        ),
        "width": (
            state | {"decoder.layers.mlp.linear_fc2.weight": torch.ones(3, 32, 47)},
            r"model.layers.0.mlp.down_proj.weight has shape \[32, 47\], but the configuration expects \[32, 48\]",
        ),
    }
    del cases["missing"][0]["decoder.final_layernorm.weight"]
    for name, (changed, said) in cases.items():
        save(tmp_path / name, model, changed)
        with pytest.raises(CheckpointError, match=said):
            inspect_checkpoint(tmp_path / name)


def test_a_truncated_file_is_named(tmp_path: Path, random_model: Any) -> None:
    model = random_model("Llama")
    save(tmp_path, model, megatron_state(model))
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor .* can't be read .*Fetch the file again"):
        load_model(tmp_path, dtype="float32")


def test_a_folder_without_a_configuration_is_refused_with_the_remedy(tmp_path: Path, random_model: Any) -> None:
    model = random_model("Llama")
    save(tmp_path, model, megatron_state(model))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds a Megatron checkpoint, but no config.json. Put"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(("family", "changes"), [("Olmo2", {}), ("Gemma2", {}), ("Olmoe", EXPERTS)])
def test_a_family_without_megatron_names_is_refused(
    family: str, changes: dict[str, Any], tmp_path: Path, random_model: Any
) -> None:
    model = random_model(family, **changes)
    save(tmp_path, model, {"decoder.final_layernorm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=f"a Megatron checkpoint of {family.lower()}, which isn't read from"):
        load_model(tmp_path, dtype="float32")


def test_layers_with_and_without_experts_lie_side_by_side(
    tmp_path: Path, paged_requests: Any, random_model: Any
) -> None:
    model = random_model("Qwen3Moe", mlp_only_layers=[1], **EXPERTS)
    save(tmp_path, model, megatron_state(model, "layers apart"))
    assert_same_logits(tmp_path, model, paged_requests)


def test_experts_that_do_not_fit_the_configuration_are_named(tmp_path: Path, random_model: Any) -> None:
    model = random_model("Qwen3Moe", **EXPERTS)
    state = megatron_state(model)
    fc2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    apart = megatron_state(model, "all apart")
    del apart["decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_v"]
    cases = {
        "fewer": (state | {fc2: torch.ones(3, 3, 32, 16)}, f"{fc2} has 3 experts, but the configuration expects 4"),
        "flat": (state | {fc2: torch.ones(3)}, f"{fc2} has 0 experts, but the configuration expects 4"),
        "bias": (
            state | {"decoder.layers.mlp.router.expert_bias": torch.ones(3, 4)},
            "tensor decoder.layers.mlp.router.expert_bias found that the configuration does not have",
        ),
        "missing": (apart, r"tensor model.layers.2.mlp.experts.3.up_proj.weight missing"),
    }
    for name, (changed, said) in cases.items():
        save(tmp_path / name, model, changed)
        with pytest.raises(CheckpointError, match=said):
            inspect_checkpoint(tmp_path / name)


def test_a_configuration_with_more_experts_than_the_router_allocates_no_memory(
    tmp_path: Path, random_model: Any
) -> None:
    model = random_model("Qwen3Moe", **EXPERTS)
    model.config.num_experts = 10**8
    save(tmp_path, model, megatron_state(model, "all apart"))
    with pytest.raises(CheckpointError, match=r"router.weight has shape \[4, 32\], but .* expects 100000000 rows"):
        inspect_checkpoint(tmp_path)

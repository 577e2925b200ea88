"""Flags of ``megatron-serve``, as ranks apply them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.byte_backend import byte_backend
from runtime_support.serve_command import invoke, launch_options
from runtime_support.small_facts import PLENTY, SMALL_FACTS
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from tokenizers import models

from megatron_runtime import rank
from megatron_runtime.errors import CheckpointError, ConfigurationError, EngineError
from megatron_runtime.launch.draft_model import load_draft_model
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.launch.rank_options import RankOptions, RankPlan
from megatron_runtime.launch.tasks import rank_plan, rank_task
from megatron_runtime.model.tokenizer import Tokenizer, load_tokenizer


class Link:
    """The methods of ParentLink that a loading rank uses."""

    def report(self, **_: object) -> None:
        """Ignored."""


@pytest.fixture
def rank_options(tmp_path: Path) -> Any:
    """``rank_options(*flags)``: the options and the plan of a rank of a pod with these flags."""

    def options(*flags: str) -> tuple[RankOptions, RankPlan]:
        launched = launch_options("--model", str(tmp_path), *flags)
        plan = plan_engine(launched, SMALL_FACTS, PLENTY)
        task = rank_task(launched, rank=0, key=None)
        later = rank_plan(SMALL_FACTS, plan, address="tcp://127.0.0.1:1").serialize()
        given = json.loads(json.dumps({**task.options, **later}))
        return RankOptions.deserialize(given), RankPlan.deserialize(given)

    return options


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((), "raw_logprobs"), (("--logprobs-mode", "processed_logprobs"), "processed_logprobs")],
)
def test_the_log_prob_mode_reaches_the_engine(rank_options: Any, flags: tuple[str, ...], mode: str) -> None:
    options, plan = rank_options(*flags)
    assert rank._inference_config(options.engine, plan).logprobs_mode == mode


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ((), None),
        (("--device", "cuda"), -1),
        (("--device", "cuda", "--num-cuda-graphs", "0"), 0),
        (("--device", "cuda", "--num-cuda-graphs", "4"), 4),
    ],
)
def test_a_gpu_runs_cuda_graphs_unless_a_flag_says_otherwise(
    rank_options: Any, flags: tuple[str, ...], count: int | None
) -> None:
    options, plan = rank_options(*flags)
    assert rank._inference_config(options.engine, plan).num_cuda_graphs == count


@pytest.mark.parametrize(("flags", "wanted"), [((), False), (("--batch-invariant",), True)])
def test_bits_that_do_not_depend_on_the_batch_are_an_option(
    rank_options: Any, flags: tuple[str, ...], wanted: bool
) -> None:
    options, plan = rank_options(*flags)
    assert rank._inference_config(options.engine, plan).batch_invariant == wanted


@pytest.mark.parametrize(("flags", "most"), [((), 0), (("--num-speculative-tokens", "5"), 5)])
def test_the_number_of_drafts_reaches_the_engine(rank_options: Any, flags: tuple[str, ...], most: int) -> None:
    options, plan = rank_options(*flags)
    assert rank._inference_config(options.engine, plan).num_speculative_tokens == most


def test_the_memory_of_recurrent_states_reaches_the_engine(rank_options: Any) -> None:
    options, plan = rank_options("--prefix-caching-mamba-gb", "1.5")
    # The small model has no recurrent layers, so that its launcher refuses the flag of the ratio.
    config = rank._inference_config(replace(options.engine, mamba_memory_ratio=0.25), plan)
    assert (config.mamba_memory_ratio, config.prefix_caching_mamba_gb) == (0.25, 1.5)
    options, plan = rank_options()
    config = rank._inference_config(options.engine, plan)
    assert (config.mamba_memory_ratio, config.prefix_caching_mamba_gb) == (None, None)


def test_a_rank_loads_the_draft_model(rank_options: Any, tmp_path: Path) -> None:
    folder, other = write_tiny_checkpoint(tmp_path / "draft"), byte_backend()
    options, _ = rank_options("--num-speculative-tokens", "5", "--speculative-draft-model", str(folder))
    tokenizer, device = load_tokenizer(folder), torch.device("cpu")
    draft = load_draft_model(options.engine, tokenizer, device=device, max_sequence_length=100)
    assert draft is not None
    assert draft.config.max_position_embeddings == 100
    vocabulary = {text: (token + 7) % 256 for text, token in other.get_vocab(with_added_tokens=False).items()}
    other.model = models.BPE(vocabulary, [])
    shifted = Tokenizer(other, location="shifted", eod=256)
    with pytest.raises(ConfigurationError, match=f"--speculative-draft-model {folder}: its vocabulary is another one"):
        load_draft_model(options.engine, shifted, device=device, max_sequence_length=100)


def test_an_unknown_log_prob_mode_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done, _ = invoke("--model", str(tmp_path), "--logprobs-mode", "cooked")
    assert done.exit_code == 2
    assert "--logprobs-mode cooked: use one of raw_logprobs, processed_logprobs" in done.output


@pytest.mark.parametrize(("flags", "checks"), [((), False), (("--check-finite",), True)])
def test_weights_are_checked_for_nan_if_configured(
    rank_options: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], checks: bool
) -> None:
    asked: list[bool] = []

    def load_model(*_: object, check_finite: bool, **__: object) -> None:
        asked.append(check_finite)
        raise CheckpointError("stop here")

    monkeypatch.setattr("megatron_runtime.model.checkpoint.load_model", load_model)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(CheckpointError, match="stop here"):
        rank._build_engine(Link(), *rank_options(*flags))  # type: ignore[arg-type]
    assert asked == [checks]


@pytest.mark.parametrize(("flags", "choice"), [((), "expand"), (("--quantized-weights", "keep"), "keep")])
def test_the_choice_of_quantized_weights_reaches_the_model(
    rank_options: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], choice: str
) -> None:
    asked: list[str] = []

    def load_model(*_: object, quantized_weights: str, **__: object) -> None:
        asked.append(quantized_weights)
        raise CheckpointError("stop here")

    monkeypatch.setattr("megatron_runtime.model.checkpoint.load_model", load_model)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(CheckpointError, match="stop here"):
        rank._build_engine(Link(), *rank_options(*flags))  # type: ignore[arg-type]
    assert asked == [choice]


def test_kernels_for_gpus_are_compiled_for_the_configured_block_size(
    rank_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def load_model(*_: object, block_size_tokens: int, **__: object) -> None:
        asked.append(block_size_tokens)
        raise CheckpointError("stop here")

    monkeypatch.setattr("megatron_runtime.model.checkpoint.load_model", load_model)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(CheckpointError, match="stop here"):
        rank._build_engine(Link(), *rank_options("--block-size-tokens", "48"))  # type: ignore[arg-type]
    assert asked == [48]


@pytest.mark.parametrize(
    ("built_for", "kind", "words"),
    [
        (None, ConfigurationError, r"was built without CUDA; install a build with it, or use --device cpu$"),
        ("13.0", EngineError, "number 0 counted from 0, but PyTorch finds 0; give the pod a GPU for .*$"),
    ],
)
def test_a_missing_gpu_is_refused_with_a_fix(
    rank_options: Any, monkeypatch: pytest.MonkeyPatch, built_for: str | None, kind: type[Exception], words: str
) -> None:
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(kind, match=f"^--device cuda: .*{words}"):
        rank._build_engine(Link(), *rank_options("--device", "cuda"))  # type: ignore[arg-type]


def test_a_rank_without_enough_gpu_memory_for_the_weights_ends_with_sizes_and_remedy(
    rank_options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has ...")

    monkeypatch.setattr("megatron_runtime.model.checkpoint.load_model", load_model)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    words = (
        r"^--device cpu: cpu ran out of memory while it loaded the weights \(CUDA out of memory\); use a smaller --dt"
    )
    with pytest.raises(ConfigurationError, match=words):
        rank._build_engine(Link(), *rank_options())  # type: ignore[arg-type]

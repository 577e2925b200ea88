"""Engines in lock step on several ranks, in real processes: they give the answers of one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import lock_step_scenarios
from runtime_support.rank_processes import run_ranks
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.worker import free_port

from megatron_runtime.engine.worker.follower_actions import run_follower
from megatron_runtime.engine.worker.lock_step import LockStepEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.single_rank import SingleRank
from megatron_runtime.sampling_params import SamplingParams

TENSOR, PIPELINE, BOTH = ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(tensor=2, pipeline=2)
TENSOR_4 = ParallelSizes(tensor=4)
EXPERT_2, EXPERT_4 = ParallelSizes(tensor=2, expert=2), ParallelSizes(tensor=4, expert=4)
EXPERT_ALONE = ParallelSizes(expert=4)
EXPERT_BESIDE_TENSOR = ParallelSizes(tensor=2, expert=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with experts."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("mixture"), experts=4)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with multi-head latent attention."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("latent"), has_latent_attention=True)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two with recurrent layers and experts. Of four layers of "mamba", the first stage has no attention."""
    folder = tmp_path_factory.mktemp("recurrent")
    return {kind: write_tiny_checkpoint(folder / kind, recurrent=kind, layers=4) for kind in ("delta", "mamba")}


@cache
def alone(path: Path) -> list[Any]:
    """The answers of one rank."""
    torch.set_num_threads(1)
    return lock_step_scenarios.serve(lock_step_scenarios.build(path))


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [(TENSOR, "offload"), (TENSOR_4, "recompute"), (PIPELINE, "recompute"), (BOTH, "persist")],
    ids=str,
)
def test_several_ranks_give_the_answers_of_one_through_eviction_pause_and_suspension(
    tiny: Path, sizes: ParallelSizes, mode: str
) -> None:
    assert_same_as_alone(tiny, sizes, mode)


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        (EXPERT_2, "recompute"),
        (EXPERT_4, "offload"),
        (EXPERT_ALONE, "recompute"),
        (EXPERT_BESIDE_TENSOR, "persist"),
    ],
    ids=str,
)
def test_expert_parallel_ranks_give_the_answers_of_one(mixture: Path, sizes: ParallelSizes, mode: str) -> None:
    assert_same_as_alone(mixture, sizes, mode)


@pytest.mark.parametrize(("sizes", "mode"), [(TENSOR, "offload"), (BOTH, "recompute")], ids=str)
def test_ranks_that_cache_latents_answer_as_one_does(latent: Path, sizes: ParallelSizes, mode: str) -> None:
    assert_same_as_alone(latent, sizes, mode)


@pytest.mark.parametrize(
    ("kind", "sizes", "mode"),
    [
        ("delta", PIPELINE, "persist"),
        ("delta", EXPERT_2, "offload"),
        ("mamba", TENSOR, "recompute"),
        ("mamba", BOTH, "offload"),
    ],
    ids=str,
)
def test_ranks_with_recurrent_states_answer_as_one_does(
    recurrent: dict[str, Path], kind: str, sizes: ParallelSizes, mode: str
) -> None:
    assert_same_as_alone(recurrent[kind], sizes, mode)


@pytest.mark.parametrize(("sizes", "mode"), [(TENSOR, "offload"), (EXPERT_BESIDE_TENSOR, "recompute")], ids=str)
def test_ranks_verify_the_drafts_of_the_one_that_samples(mixture: Path, sizes: ParallelSizes, mode: str) -> None:
    stats = assert_same_as_alone(mixture, sizes, mode, draft=mixture)[0]["stats"]
    assert stats.accepted_draft_tokens_total > 0.9 * stats.draft_tokens_total > 0


@pytest.mark.parametrize(("sizes", "mode"), [(TENSOR, "offload"), (TENSOR_4, "recompute"), (BOTH, "persist")], ids=str)
def test_each_tensor_parallel_rank_of_the_last_stage_samples_as_on_gpus(
    tiny: Path, sizes: ParallelSizes, mode: str
) -> None:
    results = assert_same_as_alone(tiny, sizes, mode, as_on_gpus=True)
    sampled = [rank["sampled passes"] for rank in results]
    sampler, *others = sampled[-sizes.tensor :]
    assert sampled[: -sizes.tensor] == [0] * (len(sampled) - sizes.tensor)
    assert 0 < others[0] < sampler, "passes with a grammar are sampled by one rank"
    assert set(others) == {others[0]}


@pytest.mark.parametrize(("sizes", "mode"), [(EXPERT_2, "recompute"), (EXPERT_BESIDE_TENSOR, "offload")], ids=str)
def test_expert_parallel_ranks_sample_as_on_gpus(mixture: Path, sizes: ParallelSizes, mode: str) -> None:
    """Also with drafts, whose messages come between those of the passes."""
    results = assert_same_as_alone(mixture, sizes, mode, draft=mixture, as_on_gpus=True)
    assert [rank["sampled passes"] > 0 for rank in results] == [True, True, False, False][: len(results)]


def test_ranks_that_sample_different_tokens_raise_an_error(tiny: Path) -> None:
    said = run_ranks(lock_step_scenarios.sample_another_token, 2, TENSOR, free_port(), tiny)
    assert said[1].startswith("LockStepError: rank 1 (tensor 1, stage 0) of replica group 0 has sampled the tokens [")
    assert said[0].startswith("LostRankError: ")


def assert_same_as_alone(
    path: Path, sizes: ParallelSizes, mode: str, draft: Path | None = None, *, as_on_gpus: bool = False
) -> Any:
    """The results of all ranks."""
    scenario = lock_step_scenarios.serve_as_on_gpus if as_on_gpus else lock_step_scenarios.serve_in_lock_step
    results = run_ranks(scenario, sizes.ranks_per_replica_group, sizes, free_port(), path, mode, draft)
    assert results[0]["answers"] == alone(path)
    assert [answer.reason for answer in results[0]["answers"][-2:]] == ["stop", "error"]
    assert results[0]["evictions"] > 0
    assert results[0]["stats"].prefix_hits_total > 0
    assert (results[0]["too long"], results[0]["aborted"]) == ("FAILED", "abort")
    assert all(rank["stats"] == results[0]["stats"] for rank in results)
    # Each stage has a pass: the first step begins one with the first request, the next step one with the other. A draft
    # model may draft the second token of both: the times of earlier passes decide.
    in_step = {0} if sizes.pipeline > 1 else {2} if draft is None else {2, 3, 4}
    assert results[0]["tokens of a step"] in in_step
    assert results[0]["tokens before a pause"] in {max(each, 1) for each in in_step}
    return results


@pytest.fixture(scope="module")
def renewed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Another checkpoint, and the results of two ranks that load it."""
    other = write_tiny_checkpoint(tmp_path_factory.mktemp("renewed") / "other", seed=4)
    return other, run_ranks(lock_step_scenarios.renew, 2, TENSOR, free_port(), tiny, other)


def test_weights_are_loaded_by_all_ranks_or_by_none(tiny: Path, renewed: tuple[Path, list[dict[str, Any]]]) -> None:
    other, results = renewed
    assert "nowhere" in results[0]["errors"][0]
    assert "loads weights from files; give their path" in results[0]["errors"][1]
    assert results[0]["answers"] == alone(other) != alone(tiny)
    assert (results[0]["version"], results[1]["own version"]) == (1, 1)


def test_all_ranks_have_the_epoch_and_write_a_trace(renewed: tuple[Path, list[dict[str, Any]]]) -> None:
    other, results = renewed
    assert results[0]["epochs"] == [(0, 3)]
    assert [result["own epoch"] for result in results] == [3, 3]
    assert len(list((other.parent / "profiles").iterdir())) == 2


def test_a_rank_out_of_step_is_detected(tiny: Path) -> None:
    results = run_ranks(lock_step_scenarios.stray, 2, PIPELINE, free_port(), tiny)
    assert any("LockStepError" in words or "LostRankError" in words for words in results)
    assert "nothing" not in results


def test_a_rank_that_does_not_suspend_in_time_is_named(tiny: Path) -> None:
    results = run_ranks(lock_step_scenarios.miss_suspension, 2, TENSOR, free_port(), tiny)
    assert "barrier suspend, for up to 1.5 s: rank 1 (tensor 1, stage 0) is missing" in results[0]


def test_ranks_without_requests_use_no_processor(tiny: Path) -> None:
    used = run_ranks(lock_step_scenarios.wait_idle, 2, TENSOR, free_port(), tiny)
    assert max(used) < 0.3


def test_a_request_timeout_is_refused_because_ranks_have_no_common_clock(tiny: Path) -> None:
    engine = lock_step_scenarios.build(tiny, request_timeout=3.0)
    with pytest.raises(
        ConfigurationError, match=r"request_timeout=3\.0: the ranks of a replica group have no common clock"
    ):
        LockStepEngine(engine, SingleRank())


class RecordedRank(SingleRank):
    """Keeps the messages of the first rank for a follower that runs later."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def share_inbox(self, inbox: bytes | None) -> bytes:
        if inbox is None:
            return self.sent.pop(0)
        self.sent.append(inbox)
        return inbox


def test_a_follower_drops_cached_prefixes_between_the_same_steps(tiny: Path) -> None:
    first, other = lock_step_scenarios.build(tiny), lock_step_scenarios.build(tiny)
    ranks = RecordedRank()
    engine = LockStepEngine(first, ranks)
    short = SamplingParams(temperature=0, num_tokens_to_generate=1, ignore_eos=True)
    engine.add_request(0, list(range(64)), short)
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert first.scheduler.allocator.prefixes.num_registered > 0
    engine.invalidate_prefix_cache()
    engine.add_request(1, [5, 6, 7], short)
    engine.step_modern()
    engine.release_followers()
    run_follower(other, ranks)
    assert [rank.scheduler.allocator.prefixes.num_registered for rank in (first, other)] == [0, 0]


def test_a_follower_counts_epochs_and_weight_updates_between_the_same_steps(tiny: Path) -> None:
    first, other = lock_step_scenarios.build(tiny), lock_step_scenarios.build(tiny)
    ranks = RecordedRank()
    engine = LockStepEngine(first, ranks)
    engine.add_request(0, [5, 6, 7], SamplingParams(temperature=0, num_tokens_to_generate=6, ignore_eos=True))
    engine.step_modern()
    engine.set_generation_epoch(4)
    engine.increment_staleness()
    engine.step_modern()
    engine.release_followers()
    run_follower(other, ranks)
    for request in (first.get_request(0), other.get_request(0)):
        assert request.policy_epoch == [(0, 4)]
        assert request.policy_staleness is not None
        assert request.policy_staleness.tolist() == [1, 1, 1, 1]

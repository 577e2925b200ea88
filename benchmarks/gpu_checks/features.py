"""Whether engines with further features generate the tokens of the CPU: the cases of the tests, adapters, drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_support.engine_cases import CASES, RECURRENT, write_adapters
from gpu_support.small_engine import generate, on_gpu, random_decoder, small_engine, with_noise

from gpu_checks.correctness import same_tokens
from gpu_checks.results import Check, Result, Sizes
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.sampling_params import SamplingParams

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"num_cuda_graphs": 0},
    "graphs": {"num_cuda_graphs": -1, "use_cuda_graphs_for_non_decode_steps": True, "cuda_graph_max_tokens": 64},
}
DRAFTS = 3
LENGTHS = (40, 33, 37, 29)
"""Of answers: long enough for a model to repeat itself, so that prompt lookup finds drafts that are accepted."""
DRY_CASES = ("greedy",)
"""Those of a dry run: the tests run all of them."""


def checks(sizes: Sizes) -> Iterator[Check]:
    """Eagerly and in graphs; without a GPU a few."""
    for name, case in (CASES | RECURRENT).items():
        if sizes.has_gpu or name in DRY_CASES:
            yield f"engine's tokens, feature: {name}", partial(check_case, sizes, name, case)
    yield "engine's tokens, feature: adapters", partial(check_adapters, sizes)
    yield "engine's tokens, feature: drafts", partial(check_drafts, sizes)


def kinds(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Of passes; in a dry run eager ones, since other rows have graphs."""
    return GRAPHS if sizes.has_gpu else {"eager": GRAPHS["eager"]}


def check_case(sizes: Sizes, name: str, case: dict[str, Any]) -> Iterator[Result]:
    """One of the cases, whose settings can say more than those of the passes."""
    given: dict[str, Any] = {"params": {}, "between": None, "config": {}, "model": {}} | case
    model = random_decoder(**given["model"])
    expected = generate(small_engine(model, **given["config"]), given["params"], given["between"])
    for kind, passes in kinds(sizes).items():
        engine = small_engine(on_gpu(model), **(passes | given["config"]))
        found = generate(engine, given["params"], given["between"])
        yield same_tokens(f"engine's tokens, {name}, {kind}", found, expected)


def check_adapters(sizes: Sizes) -> Iterator[Result]:
    """Requests with two adapters, and one without, in the same passes."""
    model = random_decoder(num_layers=1)
    with tempfile.TemporaryDirectory() as name:
        folders = write_adapters(Path(name))

        def tokens(engine: DynamicInferenceEngine) -> list[list[int]]:
            for folder in folders:
                engine.adapters.load(folder.name, folder)
            given: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "num_tokens_to_generate": 12}
            futures = [
                engine.add_request(at, [65 + at] * 5, SamplingParams(**given, adapter=each))
                for at, each in enumerate(("one", None, "three"))
            ]
            while engine.has_unfinished_requests():
                engine.step_modern()
            return [future.result(timeout=0).merge().generated_tokens for future in futures]

        expected = tokens(small_engine(model))
        for kind, passes in kinds(sizes).items():
            found = tokens(small_engine(on_gpu(model), **passes))
            yield same_tokens(f"engine's tokens, adapters, {kind}", found, expected)


def check_drafts(sizes: Sizes) -> Iterator[Result]:
    """By prompt lookup, and by a draft model that is the model with noise; how many drafts were accepted."""
    model = random_decoder(num_layers=1)
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    drafts = {"prompt lookup": None, "a draft model": with_noise(model)}
    for origin, draft in [*drafts.items()][: None if sizes.has_gpu else 1]:
        for kind, passes in kinds(sizes).items():
            options = {} if draft is None else {"speculative_draft_model": on_gpu(draft)}
            engine = small_engine(on_gpu(model), num_speculative_tokens=DRAFTS, **(passes | options))
            engine.context.clock = lambda: 0.0  # drafts are tried whatever they cost
            result = same_tokens(
                f"engine's tokens, drafts of {origin}, {kind}", generate(engine, {}, lengths=LENGTHS), expected
            )
            stats = engine.stats()
            words = f"{result.value}; {stats.accepted_draft_tokens_total} of {stats.draft_tokens_total} accepted"
            wrong = result.is_wrong or stats.accepted_draft_tokens_total == 0
            yield Result(result.name, words, result.limit, is_wrong=wrong)

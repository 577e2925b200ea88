"""The choices of a request are freed as soon as it has ended."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import load_tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.errors import ApiError, unavailable
from megatron_runtime.server.generation.choice import ChoiceTask
from megatron_runtime.server.generation.choice_run import ChoiceRun, ChoiceRunner
from megatron_runtime.server.generation.generation import Generation, collect
from megatron_runtime.server.metrics import FrontendMetrics

CHOICES = 8


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Reference cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def client() -> AsyncIterator[InferenceClient]:
    """Of a coordinator that does not answer."""
    started = InferenceClient("tcp://127.0.0.1:1", key="k" * 40)
    started.start()
    yield started
    started.stop()


def choices() -> list[ChoiceRun]:
    return [each for each in gc.get_objects() if isinstance(each, ChoiceRun)]


@pytest.mark.usefixtures("without_collector")
async def test_no_reference_cycle_has_the_choices_of_a_request(client: InferenceClient, tiny_checkpoint: Path) -> None:
    runner = ChoiceRunner(client, load_tokenizer(tiny_checkpoint), FrontendMetrics())
    tasks = [ChoiceTask(index, [1, 2, 3], SamplingParams()) for index in range(CHOICES)]
    admission = AdmissionController(client, replica_group_wait=1.0, retry_after=1, max_in_flight=CHOICES)
    generation = Generation(runner, tasks, timeout=60.0, admission=admission)
    answer = asyncio.create_task(collect(generation))
    await asyncio.sleep(0)  # until it waits for answers
    assert len(choices()) == CHOICES
    generation.abort(unavailable("aborted by the test", retry_after=1))
    with pytest.raises(ApiError):
        await answer
    await asyncio.sleep(0)  # the callbacks of the cancelled requests
    assert not choices()

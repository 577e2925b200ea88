"""All requests are answered while random processes of a pod are killed or stopped, with real processes and clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import APIConnectionError, AsyncOpenAI
from runtime_support.margin import least_margin
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.repetition import repeated, seed_of_run
from transformers import AutoModelForCausalLM

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.notifier import Notifier
from megatron_runtime.sampling_params import SamplingParams

REQUESTS = repeated(150, 500)
CANDIDATES = repeated(180, 600)
LEAST_MARGIN = 1e-4
"""Minimum difference between the two largest scores. Rounding depends on the batch: over 100,000 tokens, some differ by
less than 2e-6."""
IN_FLIGHT = 40
REPLICAS = 3
FRONTENDS = 2
SEED_VARIABLE = "MEGATRON_CHAOS_SEED"
RANK = "megatron_runtime.rank"
VICTIMS = {
    (RANK, signal.SIGKILL): repeated(2, 5),
    (RANK, signal.SIGSTOP): repeated(1, 3),
    ("coordinator_process", signal.SIGKILL): repeated(2, 6),
    ("server.frontend", signal.SIGKILL): repeated(2, 6),
}
"""Number of signals per kind of process, by a word of its command line."""
DISTURBANCES = sum(VICTIMS.values())
STALL_SECONDS = CoordinatorOptions.engine_timeout + 2
"""Seconds that a process stays stopped: its requests move to others, but the launcher does not consider it hung yet."""
DEADLINE = 240.0
SETTLING = 15.0
"""Seconds; less than the coordinator keeps requests of disconnected clients, because all clients reconnect here."""


@dataclass(frozen=True)
class Job:
    """One request; greedy or seeded, streamed or not, over HTTP or through the library's client."""

    number: int
    prompt: list[int]
    params: SamplingParams
    stream: bool
    http: bool


def make_jobs(rng: random.Random) -> list[Job]:
    """Jobs: every second one streams, every second pair uses HTTP, every second four are greedy.

    There are more than needed, because ``decided`` removes some.
    """
    jobs = []
    for number in range(CANDIDATES):
        params = SamplingParams(
            temperature=0.0 if number & 4 else rng.choice([0.7, 1.0]),
            seed=rng.randrange(2**32),
            num_tokens_to_generate=rng.randrange(100, 400),
            ignore_eos=True,
            streaming=bool(number & 1),
        )
        prompt = [rng.randrange(256) for _ in range(rng.randrange(4, 60))]
        jobs.append(Job(number, prompt, params, stream=bool(number & 1), http=bool(number & 2)))
    return jobs


def undisturbed(checkpoint: Path, jobs: list[Job]) -> list[Any]:
    """The answers of an engine without failures."""
    llm = MegatronLLM(
        model=load_model(checkpoint, dtype="float32"),
        tokenizer=load_tokenizer(checkpoint),
        inference_config=InferenceConfig(kv_cache_memory_bytes=64 * 2**20),
    )
    with llm:
        requests: list[Any] = llm.generate([job.prompt for job in jobs], [job.params for job in jobs])
    return requests


def decided(checkpoint: Path, jobs: list[Job], wanted: list[Any]) -> tuple[list[Job], list[Any]]:
    """The first jobs whose answer does not depend on rounding, renumbered, with their answers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[tuple[Job, Any]] = []
    for job, request in zip(jobs, wanted, strict=True):
        if least_margin(model, job.prompt, request.generated_tokens, job.params) > LEAST_MARGIN:
            chosen.append((replace(job, number=len(chosen)), request))
    assert len(chosen) >= REQUESTS
    left, right = zip(*chosen[:REQUESTS], strict=True)
    return list(left), list(right)


class Crowd:
    """The clients: send all requests, a fixed number at a time.

    Attributes:
        answers: The answers of each job, by its number: texts over HTTP, tokens from the library's client.
        broken: The text of interrupted HTTP streams, with the number of the job.
    """

    def __init__(self, pod: Any, client: InferenceClient) -> None:
        self._client = client
        # The connections of a killed frontend break: OpenAI's client retries the request, unless it has begun to read a
        # stream.
        self._openai = AsyncOpenAI(
            base_url=f"http://{pod.host}:8000/v1",
            api_key="none",
            max_retries=20,
            timeout=DEADLINE,
            http_client=httpx.AsyncClient(trust_env=False, timeout=DEADLINE),
        )
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._answered = Notifier()
        self.answers: dict[int, list[Any]] = {}
        self.broken: list[tuple[int, str]] = []

    async def ask_all(self, jobs: list[Job]) -> None:
        """Returns when all are answered; raises the first error."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await self._room.acquire()
                group.create_task(self._ask(job))
        await self._openai.close()

    async def wait_for(self, count: int) -> None:
        """Waits until ``count`` requests are answered."""
        while len(self.answers) < count:
            await self._answered.wait()

    async def _ask(self, job: Job) -> None:
        answer = await (self._over_http(job) if job.http else self._through_the_client(job))
        self.answers.setdefault(job.number, []).append(answer)
        self._room.release()
        self._answered.notify()

    async def _through_the_client(self, job: Job) -> list[int]:
        if not job.stream:
            return list((await self._client.add_request(job.prompt, job.params)).generated_tokens)
        tokens: list[int] = []
        finished = 0
        async for update in self._client.stream_request(job.prompt, job.params):
            tokens += update.new_tokens
            finished += update.finished is not None
        assert finished == 1
        return tokens

    async def _over_http(self, job: Job) -> str:
        asked: dict[str, Any] = {
            "model": "chat",
            "prompt": job.prompt,
            "temperature": job.params.temperature,
            "seed": job.params.seed,
            "max_tokens": job.params.num_tokens_to_generate,
            "extra_body": {"ignore_eos": True},
            "extra_headers": {"Idempotency-Key": f"job {job.number}"} if job.number % 3 else {},
        }
        if not job.stream:
            return str((await self._openai.completions.create(**asked)).choices[0].text)
        while True:
            text, reasons = "", []
            try:
                async for chunk in await self._openai.completions.create(**asked, stream=True):
                    text += chunk.choices[0].text
                    reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            except (httpx.TransportError, APIConnectionError):
                self.broken.append((job.number, text))
                continue
            assert reasons == ["length"]
            return text


class Reaper:
    """Kills or stops processes of the pod, one after the other, after a number of answers each.

    Attributes:
        harmed: Number of signals by kind of process and signal.
    """

    def __init__(self, pod: Any, crowd: Crowd, rng: random.Random) -> None:
        self._pod = pod
        self._crowd = crowd
        self._rng = rng
        self._stopped: set[int] = set()
        self.harmed: Counter[tuple[str, signal.Signals]] = Counter()

    async def run(self) -> None:
        """Returns after the last signal, when all stopped processes continue."""
        harms = [harm for harm, times in VICTIMS.items() for _ in range(times)]
        self._rng.shuffle(harms)
        async with asyncio.TaskGroup() as group:
            for number, (word, harm) in enumerate(harms):
                await self._crowd.wait_for((number + 1) * REQUESTS // (DISTURBANCES + 1))
                victim = await self._victim(word)
                os.kill(victim, harm)
                self.harmed[word, harm] += 1
                if harm is signal.SIGSTOP:
                    self._stopped.add(victim)
                    group.create_task(self._let_go_on(victim))

    async def _victim(self, word: str) -> int:
        """A running process of this kind; waits for one that is being restarted."""
        while True:
            children = self._pod.children().items()
            if found := sorted(pid for pid, command in children if word in command and pid not in self._stopped):
                return self._rng.choice(found)
            await asyncio.sleep(0.02)

    async def _let_go_on(self, pid: int) -> None:
        try:
            await asyncio.sleep(STALL_SECONDS)
        finally:
            self._stopped.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.repetition
@pytest.mark.timeout(330)
async def test_each_request_is_answered_once_and_correctly_while_processes_are_killed_or_stopped(
    start_pod: Callable[..., Any], tmp_path: Path
) -> None:
    seed = seed_of_run(SEED_VARIABLE)
    print(f"{SEED_VARIABLE}={seed}")
    rng = random.Random(seed)
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    flags = ["--model", str(checkpoint), "--kv-cache-memory", "32Mi", "--dtype", "float32", "--max-restarts", "1000"]
    pod = start_pod(*flags, "--replica-groups", str(REPLICAS), "--frontend-replicas", str(FRONTENDS))
    jobs = make_jobs(rng)
    wanted = await asyncio.to_thread(undisturbed, checkpoint, jobs)
    jobs, wanted = await asyncio.to_thread(decided, checkpoint, jobs, wanted)
    await asyncio.to_thread(pod.wait_for, lambda state: state["ready"] and len(state["replicaGroups"]) == REPLICAS)
    client = InferenceClient(f"tcp://{pod.host}:5557", key=pod.key)
    await client.start()
    crowd = Crowd(pod, client)
    reaper = Reaper(pod, crowd, rng)
    try:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(crowd.ask_all(jobs), reaper.run())
        # The engines drop requests of a frontend that was killed at the end once its loss is detected.
        async with asyncio.timeout(SETTLING):
            while (await client.service_state()).outstanding_requests:
                pass
    except BaseException:
        print(f"harmed {dict(reaper.harmed)}, answered {len(crowd.answers)}; the end of the pod's log:\n{pod.words()}")
        raise
    finally:
        client.stop()
    assert reaper.harmed == VICTIMS
    assert reaper.harmed.total() == DISTURBANCES
    assert {number: len(answers) for number, answers in crowd.answers.items()} == dict.fromkeys(range(REQUESTS), 1)
    for job, request in zip(jobs, wanted, strict=True):
        answer = request.generated_text if job.http else request.generated_tokens
        assert crowd.answers[job.number] == [answer], f"{SEED_VARIABLE}={seed}: {job}"
    for number, text in crowd.broken:
        assert wanted[number].generated_text.startswith(text)

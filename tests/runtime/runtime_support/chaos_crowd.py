"""The clients of the chaos tests: they send jobs, retry, and record what they waited for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import httpx
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI
from runtime_support.chaos_jobs import Job

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.notifier import Notifier

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0
"""Seconds between the tries of a request."""
RETRIED = (408, 409)
"""Besides those from 500 on, as OpenAI's clients do. A frontend that was stopped while it read a request sends 408."""
HASTY_TRIES = 3
LONGEST_TRY = 0.1
"""Seconds after which a hasty client disconnects, at most."""


class Crowd:
    """Sends jobs, a limited number at a time.

    Attributes:
        answered: The number of answers of each job, by its number.
        wrong: The jobs with wrong answers, also at the beginning of an interrupted stream, and these answers.
        waits: Seconds that each request took, with all its tries.
        errors: The errors that HTTP clients got, and their number. Each was followed by a retry.
    """

    def __init__(self, url: str, client: InferenceClient, rng: random.Random, *, at_once: int, timeout: float) -> None:
        self._client = client
        self._rng = rng
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
        self._openai = AsyncOpenAI(
            base_url=url,
            api_key="none",
            max_retries=0,
            timeout=timeout,
            http_client=httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits),
        )
        self._room = asyncio.Semaphore(at_once)
        self._news = Notifier()
        self.answered: Counter[int] = Counter()
        self.wrong: list[tuple[Job, Any]] = []
        self.waits: list[float] = []
        self.errors: Counter[str] = Counter()

    async def ask_all(self, jobs: Iterable[Job], pace: Callable[[Job], Any] | None = None) -> None:
        """Returns when all are answered; raises the first error. ``pace`` is awaited before each job."""
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                if pace is not None:
                    await pace(job)
                await self._room.acquire()
                group.create_task(self._ask(job))

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()

    def restart(self) -> None:
        """Forget what was recorded, when all requests are answered."""
        self.answered.clear()
        self.waits.clear()
        self.errors.clear()

    async def wait_for(self, count: int) -> None:
        """Waits until ``count`` requests are answered."""
        while len(self.answered) < count:
            await self._news.wait()

    def wait(self, share: float) -> float:
        """The seconds within which this share of the requests was answered."""
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    async def _ask(self, job: Job) -> None:
        began = time.monotonic()
        answer = await self._answer(job)
        self.waits.append(time.monotonic() - began)
        self.answered[job.number] += 1
        if answer != (job.text if job.http else job.tokens):
            self.wrong.append((job, answer))
        self._room.release()
        self._news.notify()

    async def _answer(self, job: Job) -> Any:
        if job.http:
            return await self._over_http(job)
        while True:
            try:
                return await self._through_the_client(job)
            except CoordinatorError as error:  # there was no coordinator for longer than clients wait
                self.errors[type(error).__name__] += 1

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
        for _ in range(HASTY_TRIES if job.hasty else 0):
            with contextlib.suppress(TimeoutError, httpx.HTTPError, APIError):
                async with asyncio.timeout(self._rng.uniform(0.0, LONGEST_TRY)):
                    return await self._try(job)
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._try(job)
            except (httpx.TransportError, APIConnectionError) as error:
                self.errors[type(error).__name__] += 1
            except APIStatusError as error:
                if error.status_code not in RETRIED and error.status_code < 500:
                    raise
                self.errors[f"{error.status_code} {error.code}"] += 1
            except APIError as error:  # the last event of a stream
                self.errors[f"in a stream: {error.code}"] += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, job: Job) -> str:
        asked: dict[str, Any] = {
            "model": "chat",
            "prompt": job.prompt,
            "temperature": job.params.temperature,
            "seed": job.params.seed,
            "max_tokens": job.params.num_tokens_to_generate,
            "extra_body": {"ignore_eos": True, "bad_words": job.params.bad_words, "padding": "x" * job.padding},
            "extra_headers": {} if job.key is None else {"Idempotency-Key": job.key},
        }
        if not job.stream:
            return str((await self._openai.completions.create(**asked)).choices[0].text)
        text, reasons = "", []
        try:
            async for chunk in await self._openai.completions.create(**asked, stream=True):
                text += chunk.choices[0].text
                reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        except (httpx.TransportError, APIError):
            if not job.text.startswith(text):
                self.wrong.append((job, text))
            raise
        assert reasons == ["length"]
        return text

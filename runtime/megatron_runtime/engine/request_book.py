"""The unfinished requests of an engine, and the reports that were not collected yet."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Iterator, Sequence

from megatron_runtime.engine.request_future import new_future
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.step_result import PartialOutput
from megatron_runtime.engine.tracked_request import FinishReason, TrackedRequest
from megatron_runtime.errors import InvalidRequestError, RequestTimeoutError
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

Reports = tuple[list[DynamicInferenceRequestRecord], dict[int, PartialOutput]]


class RequestBook:
    """Opens and closes requests, and keeps their reports.

    Args:
        tokenizer: Detokenizes answers.
        block_size_tokens: Stored in every request.
        timeout: Seconds that a request may take, or None.
        prefix_caching: Stored in every request: its segments have the block hashes of their prompts.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, block_size_tokens: int, timeout: float | None, prefix_caching: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._block_size_tokens = block_size_tokens
        self._timeout = timeout
        self._prefix_caching = prefix_caching
        self._open: dict[int, TrackedRequest] = {}
        self._finished: list[DynamicInferenceRequestRecord] = []
        self._partials: dict[int, PartialOutput] = {}
        """The last ones of requests that have ended, by request id."""
        self._advanced: list[TrackedRequest] = []
        """Those that were in a pass since the last reports."""
        self.weight_version = 0
        """Current version of the model's weights; stored in every request that ends."""
        self.generation_epoch: int | None = None
        """Current epoch of the training that requests are generated for, if it was set."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._open

    def __getitem__(self, request_id: int) -> TrackedRequest:
        return self._open[request_id]

    def __iter__(self) -> Iterator[TrackedRequest]:
        """The open requests, oldest first; they may be closed during the iteration."""
        return iter(list(self._open.values()))

    def of(self, slices: Sequence[SequenceSlice]) -> list[TrackedRequest]:
        """The requests of these slices."""
        return [self._open[part.sequence.request_id] for part in slices]

    @property
    def adapters(self) -> set[int]:
        """The slots of the adapters of the open requests."""
        sequences = (tracked.sequence for tracked in self._open.values())
        return {each.adapter for each in sequences if each is not None and each.adapter is not None}

    def has_reports_or_requests(self) -> bool:
        """True if a request is open or a report was not collected."""
        return bool(self._open or self._finished)

    def open(self, request_id: int, prompt: str | None, sampling_params: SamplingParams | None) -> TrackedRequest:
        """Open a request, with a copy of its parameters and a seed if it has none.

        Raises:
            InvalidRequestError: The id is in use.
        """
        if request_id in self._open:
            raise InvalidRequestError(f"request_id={request_id} is in use", field="request_id")
        params = copy.deepcopy(sampling_params) if sampling_params is not None else SamplingParams()
        if params.seed is None:
            params.seed = secrets.randbits(63)
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt,
            sampling_params=params,
            arrival_time=time.time(),
            status=Status.WAITING_IN_QUEUE,
            block_size_tokens=self._block_size_tokens,
            enable_prefix_caching=self._prefix_caching,
            generated_log_probs=[] if params.return_log_probs else None,
            generated_top_n_logprobs=[] if params.top_n_logprobs else None,
            prompt_log_probs=[] if params.return_log_probs and not params.skip_prompt_log_probs else None,
            prompt_top_n_logprobs=[] if params.return_prompt_top_n_logprobs else None,
        )
        request.add_event_add_engine()
        tracked = TrackedRequest(
            DynamicInferenceRequestRecord.from_request(request),
            self._tokenizer,
            new_future(),
            deadline=None if self._timeout is None else time.monotonic() + self._timeout,
        )
        if self.generation_epoch is not None:
            tracked.record.stamp_epoch(self.generation_epoch)
        self._open[request_id] = tracked
        return tracked

    def set_generation_epoch(self, epoch: int) -> None:
        """Stamp every open request, and those to come, unless it is the current epoch."""
        if epoch == self.generation_epoch:
            return
        self.generation_epoch = epoch
        for tracked in self._open.values():
            tracked.record.stamp_epoch(epoch)

    def increment_staleness(self) -> None:
        """Count one more weight update in every open request; queued requests have no keys and values."""
        for tracked in self._open.values():
            has_cache = tracked.sequence is not None and tracked.sequence.is_running
            tracked.record.increment_staleness(policy_only=not has_cache)

    def close(self, tracked: TrackedRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request, queue its last report, and resolve its future."""
        del self._open[tracked.request_id]
        tracked.finish(reason, error)
        tracked.current.weight_version = self.weight_version
        if (partial := tracked.pop_partial(final=True)) is not None:
            self._partials[tracked.request_id] = partial
        self._finished.append(tracked.record)
        tracked.resolve()

    def note_pass(self, requests: Sequence[TrackedRequest]) -> None:
        """Report the new tokens of these requests, if they stream."""
        self._advanced.extend(requests)

    def note_step_time(self, request_ids: list[int], seconds: float) -> None:
        """Record the duration of a step, which generated one token of each of these requests."""
        for request_id in request_ids:
            self._open[request_id].note_time_per_token(seconds)

    def overdue(self) -> list[tuple[TrackedRequest, RequestTimeoutError]]:
        """The requests past their deadline, with the error."""
        now = time.monotonic()
        late: list[tuple[TrackedRequest, RequestTimeoutError]] = []
        # The requests are in the order of their submission, which is also that of their deadlines.
        for tracked in self._open.values():
            if tracked.deadline is None or tracked.deadline > now:
                break
            late.append((tracked, RequestTimeoutError(f"not finished within request_timeout={self._timeout} seconds")))
        return late

    def pop_reports(self) -> Reports:
        """Finished records and partial outputs since the last call."""
        finished, partials, advanced = self._finished, self._partials, self._advanced
        self._finished, self._partials, self._advanced = [], {}, []
        for tracked in advanced:
            if tracked.params.streaming and (partial := tracked.pop_partial()) is not None:
                partials[tracked.request_id] = partial
        return finished, partials

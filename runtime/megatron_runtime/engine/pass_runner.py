"""Runs passes: schedule, run, settle. With pipeline parallelism, one pass per stage is in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.draft_rows import draft_rows
from megatron_runtime.engine.drafter import Drafter
from megatron_runtime.engine.pass_graphs import PassGraphs
from megatron_runtime.engine.pass_starter import PassStarter
from megatron_runtime.engine.request_book import RequestBook
from megatron_runtime.engine.sampling.sampler import NO_TOKEN
from megatron_runtime.engine.scheduling.schedule import Schedule
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice, SettledPass
from megatron_runtime.engine.shared_output import PendingOutput
from megatron_runtime.engine.text_generation_controller import StepOutput, TextGenerationController
from megatron_runtime.engine.tracked_request import FinishReason, Scores, TrackedRequest
from megatron_runtime.errors import EngineError, InvalidLogitsError
from megatron_runtime.model.device_memory import describe_shortage, is_device_shortage


@dataclass(frozen=True)
class _Pass:
    """One pass in flight."""

    slices: list[SequenceSlice]
    requests: list[TrackedRequest]
    """The requests of the slices."""
    output: PendingOutput
    started: float
    """When it began, by the context's clock."""


class PassRunner:
    """Keeps scheduler, tables and requests consistent with each other and with the model.

    Args:
        controller: Runs the model and samples.
        context: The KV cache and its tables.
        scheduler: The scheduler over the context's allocator.
        requests: The open requests.
        graphs: The CUDA graphs; None: all passes run eagerly.

    Raises:
        ConfigurationError: The draft model of the configuration does not fit, as in `DraftModel`.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        scheduler: Scheduler,
        requests: RequestBook,
        graphs: PassGraphs | None = None,
    ) -> None:
        self._controller = controller
        self._context = context
        self._scheduler = scheduler
        self._requests = requests
        self._starter = PassStarter(controller, context, scheduler, requests, graphs)
        self.drafter = Drafter(context, controller.model, scheduler.goodput)
        self._tracks_tokens = context.config.track_generated_token_events
        self._in_flight: deque[_Pass] = deque()
        self.prompt_tokens_total = 0
        self.generated_tokens_total = 0
        self.evictions_total = 0
        self.cached_tokens_total = 0
        self.prefix_hits_total = 0
        context.reset_counts()

    @property
    def num_in_flight(self) -> int:
        """Number of passes that are begun and not settled."""
        return len(self._in_flight)

    @property
    def graph_size(self) -> int | None:
        """As of `PassStarter`."""
        return self._starter.graph_size

    def run_pass(self) -> None:
        """Begin a pass, and settle the oldest one unless another one can be begun.

        Once each running request has been in a pass, one pass begins when another one ends. A pass that fails in the
        model can be repeated.
        """
        self._controller.model.ranks.supervise(self._run_pass)

    def _run_pass(self) -> None:
        admits = self._starter.admits
        schedule = self._scheduler.schedule(admits=admits)
        self._apply(schedule)
        if schedule.slices and (begun := self._begin(schedule.slices)) is not None:
            self._in_flight.append(begun)
            self._context.count_pass(schedule.slices)
            if not self._can_admit_next(schedule, admits=admits):
                self._starter.begin_next()
        else:
            self._starter.drop_next()
        is_full = len(self._in_flight) == self._scheduler.limits.passes_in_flight
        if self._in_flight and (is_full or not schedule.slices or not self._scheduler.has_idle):
            self._settle(self._in_flight.popleft())
        if not self._in_flight and not self._scheduler.num_running and not self._scheduler.num_waiting:
            self._starter.check_outputs()  # There may be no next pass.

    def settle_all(self) -> None:
        """Settle all passes in flight, and drop what has begun besides."""
        self._controller.model.ranks.supervise(self._settle_all)

    def _settle_all(self) -> None:
        self._starter.drop_next()
        while self._in_flight:
            self._settle(self._in_flight.popleft())
        self._starter.check_outputs()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: the model may have changed."""
        self._controller.model.ranks.supervise(self._starter.drop_next)
        self._scheduler.forget_prefixes()

    def evict_all(self) -> None:
        """Evict every running request; it is computed again from its tokens."""
        self._evict(self._scheduler.evict_all())

    def finish(self, tracked: TrackedRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request and free its resources."""
        if tracked.sequence is not None and tracked.sequence in self._scheduler:
            tracked.routing = self._context.routing.of(tracked.sequence)
            self._scheduler.remove(tracked.sequence)
            self._context.vacate(tracked.sequence)
        self._requests.close(tracked, reason, error)

    def _can_admit_next(self, schedule: Schedule, *, admits: bool) -> bool:
        """Whether a request in the queue may begin with the next pass."""
        return self._scheduler.may_admit and (bool(schedule.admitted) or not admits)

    def _apply(self, schedule: Schedule) -> None:
        """Apply a schedule's evictions and admissions to requests and tables."""
        self._evict(schedule.evicted)
        for sequence in schedule.paused:
            notes_event = self._context.config.track_paused_request_events
            self._requests[sequence.request_id].pause(notes_event=notes_event)
        for sequence in schedule.admitted:
            tracked = self._requests[sequence.request_id]
            rules = tracked.stop_ids, tracked.bad_sequences, tracked.guide, tracked.thinking
            self._context.occupy(sequence, tracked.params, *rules)
            is_new = not tracked.was_scheduled
            tracked.enter_context(self._requests.generation_epoch)
            if is_new:
                self.prompt_tokens_total += sequence.prompt_length
                self.cached_tokens_total += tracked.record[0].num_cached_tokens
                self.prefix_hits_total += tracked.record[0].num_cached_tokens > 0

    def _evict(self, evicted: list[Sequence]) -> None:
        for sequence in evicted:
            self._context.vacate(sequence)
            self._requests[sequence.request_id].evict()
            self.evictions_total += 1

    def _begin(self, slices: list[SequenceSlice]) -> _Pass | None:
        """None if the device had too little memory, which ends requests of the pass."""
        self._starter.check_outputs()
        try:
            slices = self.drafter.propose(slices)
            started = self._context.clock()
            self._context.load_snapshots(slices)
            with draft_rows(slices) as rows:
                output = self._starter.begin(rows, started)
        except BaseException as error:
            self._withdraw(slices)
            if not is_device_shortage(error):
                raise
            self._fail_for_memory(slices, error)
            return None
        return _Pass(slices, self._requests.of(slices), output, started)

    def _withdraw(self, slices: list[SequenceSlice]) -> None:
        """Undo the schedule of a pass that failed. Recurrent states that it may have changed are computed again."""
        self._scheduler.withdraw(slices)
        if self._context.has_states:
            self.evict_all()

    def _fail_for_memory(self, slices: list[SequenceSlice], error: BaseException) -> None:
        """End the requests that want log probabilities of prompts, or else all requests of the pass.

        Raises:
            EngineError: Other ranks have begun the pass, and wait for this one.
        """
        device, num_tokens = self._context.device, sum(part.length for part in slices)
        failure = EngineError(
            f"{describe_shortage(f'in a pass of {num_tokens} tokens', device, error)}; lower --kv-cache-memory or "
            "--max-requests, or request no log probabilities of prompts, whose logits take further memory"
        )
        if self._controller.model.ranks.position.sizes.ranks_per_replica_group > 1:
            raise failure from error
        if device.type == "cuda":
            torch.cuda.empty_cache()
        large = [part for part in slices if part.num_logits > 1] or slices
        for part in large:
            self.finish(self._requests[part.sequence.request_id], "error", failure)

    def _settle(self, done: _Pass) -> None:
        output = done.output()
        self._apply_settled(self._scheduler.settle(done.slices))
        seconds = self._context.clock() - done.started if output.seconds is None else output.seconds
        if self._has_tokens_alone(done, output):
            self._settle_tokens(done, output.tokens)
        else:
            self._settle_outputs(done, output)
        self._requests.note_pass(done.requests)
        self.drafter.note_pass(done.slices, seconds)

    def _has_tokens_alone(self, done: _Pass, output: StepOutput) -> bool:
        """Whether the output is a valid token after each slice: nearly always in a pass over many requests."""
        has_more = output.log_probs is not None or output.pooled or output.mask_milliseconds or self._tracks_tokens
        may_draft = self._context.config.num_speculative_tokens > 0
        is_one_each = not may_draft and len(output.tokens) == len(done.slices)
        return is_one_each and not has_more and NO_TOKEN not in output.tokens

    def _settle_tokens(self, done: _Pass, tokens: list[int]) -> None:
        """As `_settle_outputs`, but faster. Each token is kept: full sequences are in passes for more than tokens."""
        for part, tracked, token in zip(done.slices, done.requests, tokens, strict=True):
            sequence = part.sequence
            if part.num_evictions != sequence.num_evictions:  # faster than `counts`
                continue
            if sequence.mask_milliseconds:
                sequence.note_mask(0)
            self.generated_tokens_total += 1
            if (reason := tracked.settle(part, token, ())) is not None:
                self.finish(tracked, reason)

    def _settle_outputs(self, done: _Pass, output: StepOutput) -> None:
        tokens = iter(enumerate(output.tokens))
        pooled = iter(output.pooled)
        next_log_prob = 0
        for part, tracked in zip(done.slices, done.requests, strict=True):
            sequence, count = part.sequence, part.num_log_probs
            row, token = next(tokens) if part.samples else (None, None)
            next_log_prob += count
            sampled = [next(tokens)[1] for _ in part.drafts] if part.drafts else None
            states = next(pooled) if output.pooled and part.num_pooled else None
            if not part.counts:
                continue
            if row is not None and (output.mask_milliseconds or sequence.mask_milliseconds):
                sequence.note_mask(output.mask_milliseconds.get(row, 0))
            if states is not None and tracked.pooled is not None:
                tracked.pooled.add(states)
            if row in output.dead_ends:
                self.finish(
                    tracked, "error", EngineError(f"the grammar has no valid continuation: {output.dead_ends[row]}")
                )
                continue
            scores: Scores = ()
            if count:
                first = next_log_prob - count
                scores = self._controller.scores(output.log_probs, first, count, tracked.params)
            self._settle_one(tracked, part, token, scores)
            if sampled and token is not None:
                self._settle_drafts(tracked, part, [token, *sampled])

    def _apply_settled(self, settled: SettledPass) -> None:
        try:
            self._context.apply(settled)
        except BaseException:
            # A snapshot may have wrong states. Without their tokens, the requests are computed again.
            self.evict_all()
            self._scheduler.forget_prefixes()
            raise

    def _settle_drafts(self, tracked: TrackedRequest, part: SequenceSlice, sampled: list[int]) -> None:
        """Keep the tokens sampled after drafts that were right themselves."""
        accepted = 0
        while accepted < len(part.drafts) and part.drafts[accepted] == sampled[accepted]:
            if part.sequence not in self._scheduler or sampled[accepted + 1] == NO_TOKEN:
                break  # The request has ended, or the next pass finds out why there is no token.
            accepted += 1
            self._scheduler.accept_draft(part.sequence)
            self._settle_one(tracked, part, sampled[accepted], ())
        self.drafter.note_drafts(part, accepted)

    def _settle_one(self, tracked: TrackedRequest, part: SequenceSlice, token: int | None, scores: Scores) -> None:
        if token == NO_TOKEN:
            # The cause may be in a cached block that other requests would share.
            self._scheduler.forget_prefixes()
            self.finish(tracked, "error", InvalidLogitsError("the model returned logits that are not finite"))
            return
        if token is not None and len(part.sequence.tokens) < part.sequence.max_length:
            self.generated_tokens_total += 1
            if self._tracks_tokens:
                self._note_token_event(tracked, token)
        reason = tracked.settle(part, token, scores)
        if reason is not None:
            self.finish(tracked, reason)

    def _note_token_event(self, tracked: TrackedRequest, token: int) -> None:
        allocator = self._context.allocator
        known = None if allocator.prefixes is None else allocator.prefixes.num_registered
        tracked.current.add_event_generated_token(
            token,
            blocks_total=allocator.num_blocks,
            blocks_hashed_total=known,
            blocks_hashed_active=None if known is None else known - allocator.num_evictable,
            blocks_ref_count=None if known is None else allocator.num_owners,
        )

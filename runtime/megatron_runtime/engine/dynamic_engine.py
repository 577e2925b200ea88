"""The engine: schedules, runs and settles one pass after the other."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence as Tokens

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.admission import Admission, Prompt
from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.engine_adapters import EngineAdapters
from megatron_runtime.engine.engine_memory import EngineMemory
from megatron_runtime.engine.pass_runner import PassRunner
from megatron_runtime.engine.request_book import Reports, RequestBook
from megatron_runtime.engine.request_future import RequestFuture
from megatron_runtime.engine.running_engine import RunningEngine
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.engine.serve_batch import serve_batch
from megatron_runtime.engine.step_log import StepLog
from megatron_runtime.engine.step_result import EngineStats, StepResult
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.engine.worker.weight_updates import require_idle
from megatron_runtime.errors import EngineSuspendedError, InvalidStateError, MegatronInferenceError
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.refit import Weights
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams


class DynamicInferenceEngine(RunningEngine):
    """Serves many requests at once from one model and one pool of KV blocks.

    Not thread-safe. ``step_modern`` raises only if the model fails; an invalid request ends as a FAILED record.

    Args:
        controller: Runs the model and samples.
        context: The KV cache and its tables, for the controller's model.
    """

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext) -> None:
        super().__init__()
        context.allocate_for(controller.model)
        self.controller = controller
        self.context = context
        self.tokenizer = controller.tokenizer
        self.config = context.config
        ranks = controller.model.ranks
        limits = context.limits.of_passes(
            chunked_prefill=self.config.enable_chunked_prefill,
            passes_in_flight=ranks.position.sizes.pipeline,
            shares_times=ranks.samples_for_all,
        )
        self.scheduler = Scheduler(limits, context.allocator)
        self.adapters = EngineAdapters(controller.model, context.device, self.config, lambda: self._requests.adapters)
        self._admission = Admission(
            self.tokenizer,
            context.limits,
            vocab_size=controller.model.config.vocab_size,
            chunked_prefill=self.config.enable_chunked_prefill,
            prefix_caching=self.config.enable_prefix_caching,
            scores_prompts=not self.config.materialize_only_last_token_logits,
            routing=context.routing,
            num_speculative_tokens=self.config.num_speculative_tokens,
            has_draft_model=self.config.speculative_draft_model is not None,
            adapters=self.adapters,
            grammar_cache_bytes=self.config.grammar_cache_bytes,
        )
        self._requests = RequestBook(
            self.tokenizer,
            block_size_tokens=context.block_size_tokens,
            timeout=self.config.request_timeout,
            prefix_caching=self.config.enable_prefix_caching,
        )
        self._memory = EngineMemory(controller, context)
        self._passes = PassRunner(controller, context, self.scheduler, self._requests, self._memory.graphs)
        self._log = StepLog(self.config.logging_step_interval, self.config.metrics_writer)
        self._ids = itertools.count()

    @classmethod
    def build(
        cls, model: Decoder, tokenizer: Tokenizer, config: InferenceConfig | None = None
    ) -> DynamicInferenceEngine:
        """An engine with a context that fits the model.

        Raises:
            ConfigurationError: As in DynamicInferenceContext.
        """
        context = DynamicInferenceContext(
            model.config, config or InferenceConfig(), dtype=model.dtype, device=model.device, shard=model.shard
        )
        return cls(TextGenerationController(model, tokenizer), context)

    @property
    def capture_stats(self) -> dict[str, float] | None:
        """Seconds and bytes of the last capture of CUDA graphs: ``time``, ``allocated_bytes`` and ``reserved_bytes``;
        None without CUDA graphs."""
        return self._memory.capture_stats

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        generated: Tokens[int] = (),
    ) -> RequestFuture:
        """Queue a request.

        Args:
            request_id: Different from the ids of all unfinished requests.
            prompt: Text or token ids.
            sampling_params: Copied; a missing seed is chosen here and stored in the request.
            generated: Tokens of the answer that another engine has generated; they count as this request's own.

        Returns:
            A future of the record: an asyncio future if an event loop runs in this thread, else a concurrent future. It
            never has an error: a request that can't be served ends as a FAILED record with an error event.

        Raises:
            InvalidRequestError: The id is in use.
        """
        tracked = self._requests.open(request_id, prompt if isinstance(prompt, str) else None, sampling_params)
        self._note_change()
        try:
            sequence = self._admission.admit(tracked.current, prompt, generated)
        except MegatronInferenceError as error:
            self._passes.finish(tracked, "error", error)
            return tracked.future
        if reason := tracked.begin(sequence):
            self._passes.finish(tracked, reason)
        else:
            self.scheduler.add(sequence)
        return tracked.future

    def abort_request(self, request_id: int) -> bool:
        """End a request now, as FAILED with its tokens so far; False if it is unknown or has ended."""
        if request_id not in self._requests:
            return False
        self._passes.finish(self._requests[request_id], "abort")
        return True

    def fail_all_requests(self, error: Exception) -> None:
        """End every unfinished request with the error."""
        for tracked in self._requests:
            self._passes.finish(tracked, "error", error)

    def expire_overdue_requests(self) -> None:
        """Fail the requests that are past their deadline. Every step calls this, and a paused loop may."""
        for tracked, error in self._requests.overdue():
            self._passes.finish(tracked, "error", error)

    def has_unfinished_requests(self) -> bool:
        """True if a step has something to compute or to report."""
        return self._requests.has_reports_or_requests()

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """The current segment of an unfinished request.

        Raises:
            KeyError: The request is unknown or has ended.
        """
        return self._requests[request_id].current

    def step_modern(self) -> StepResult:
        """Advance every running request by one pass, and report finished requests and new tokens.

        With pipeline parallelism a step begins one pass and settles the oldest pass in flight; there is one pass for
        each stage.

        Raises:
            EngineSuspendedError: The engine is suspended.
        """
        if self.is_suspended:
            raise EngineSuspendedError("the engine is suspended; resume it before the next step")
        started = time.perf_counter()
        self.expire_overdue_requests()
        self._passes.run_pass()
        self.adapters.release_unused()
        result = self._report(started)
        if self._log.note_step(self, result):
            # A request gets one token while each pass in flight takes a step.
            seconds = result["step_time"] * (self._passes.num_in_flight + 1)
            self._requests.note_step_time(result["active_request_ids"], seconds)
        return result

    async def async_step(self) -> StepResult:
        """A step that lets the event loop's other tasks run before it."""
        await asyncio.sleep(0)
        return self.step_modern()

    def pop_reports(self) -> Reports:
        """Finished records and partial outputs that no step has reported, for use without steps."""
        return self._requests.pop_reports()

    def generate(
        self, prompts: Tokens[Prompt], sampling_params: SamplingParams | Tokens[SamplingParams] | None = None
    ) -> list[DynamicInferenceRequestRecord]:
        """Serve prompts in this thread until they are finished: `serve_batch`."""
        unused = (request_id for request_id in self._ids if request_id not in self._requests)
        return serve_batch(self, unused, prompts, sampling_params)

    def barrier(self, occasion: str) -> None:
        """Settle the passes in flight; without pipeline parallelism there are none."""
        del occasion
        self._passes.settle_all()

    def suspend(self) -> None:
        """Release memory as configured; unfinished requests stay and continue after `resume`."""
        if self.is_suspended:
            return
        self._passes.settle_all()
        if self.config.kv_cache_management_mode is KVCacheManagementMode.RECOMPUTE:
            self._passes.evict_all()
            self.invalidate_prefix_cache()
        self._memory.release()
        self.is_suspended = True
        self._note_change()

    def resume(self) -> None:
        """Allocate the memory again; requests continue with the next step, with the same tokens.

        Raises:
            CheckpointError, EngineError: As `EngineMemory.restore`; the engine stays suspended.
        """
        if not self.is_suspended:
            return
        self._memory.restore()
        self.is_suspended = False
        self._note_change()

    def reset(self) -> None:
        """Drop all requests, cached prefixes, reports and counts, as in a new engine.

        Unfinished requests end as aborted. A suspended engine stays suspended.

        Raises:
            InvalidStateError: A coordinator's loop runs this engine.
        """
        if self.attached_loop is not None and not self.attached_loop.ended:
            raise InvalidStateError("reset() is for an engine without a coordinator", state=self.state.name)
        self._passes.settle_all()
        for tracked in self._requests:
            self._passes.finish(tracked, "abort")
        self._requests.pop_reports()
        self.invalidate_prefix_cache()
        self._passes = PassRunner(self.controller, self.context, self.scheduler, self._requests, self._memory.graphs)
        self._log = StepLog(self.config.logging_step_interval, self.config.metrics_writer)
        self._ids = itertools.count()

    def invalidate_prefix_cache(self) -> None:
        """Drop every cached prefix; for callers that change the model's weights themselves.

        Unfinished requests continue with their keys and values, including old ones, and later requests do not share
        them.
        """
        self._passes.forget_prefixes()

    def update_weights(self, weights: Weights, *, version: int | None = None) -> int:
        """Load other weights into the model, between steps or while suspended; an error changes nothing.

        Drops cached prefixes and counts the staleness of unfinished requests. Requests with keys and values continue
        with them; where `suspend` drops the KV cache, everything is computed with the new weights.

        Args:
            weights: As for `refit.update_weights`.
            version: The version of the weights; None: the current version plus 1.

        Returns:
            The version, which is the ``weight_version`` of requests that end from now on.

        Raises:
            CheckpointError: As for `refit.update_weights`; names the tensors that do not fit.
            InvalidStateError: A coordinator's loop runs this engine, which is neither paused nor suspended.
        """
        if self.attached_loop is not None and not self.attached_loop.ended:
            require_idle(self.state)
        self._passes.settle_all()
        self._memory.update_weights(weights)
        self.invalidate_prefix_cache()
        self.increment_staleness()
        self._requests.weight_version = self.weight_version + 1 if version is None else version
        return self.weight_version

    @property
    def ranks(self) -> Ranks:
        """The ranks of the replica group."""
        return self.controller.model.ranks

    @property
    def weight_version(self) -> int:
        """Number of weight updates, unless an update set the version."""
        return self._requests.weight_version

    def increment_staleness(self) -> None:
        """Count one more weight update in the staleness of every unfinished request.

        Queued requests have no keys and values, and so no staleness of them.
        """
        self._requests.increment_staleness()

    def set_generation_epoch(self, epoch: int) -> None:
        """Stamp unfinished and later requests with this epoch of a training, unless it is the current one."""
        self._requests.set_generation_epoch(epoch)

    def stats(self) -> EngineStats:
        """The load of the engine."""
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_blocks_total=self.context.allocator.num_blocks,
            kv_blocks_used=self.context.allocator.num_used,
            prompt_tokens_total=self._passes.prompt_tokens_total,
            generated_tokens_total=self._passes.generated_tokens_total,
            evictions_total=self._passes.evictions_total,
            kv_blocks_evictable=self.context.allocator.num_evictable,
            cached_tokens_total=self._passes.cached_tokens_total,
            prefix_hits_total=self._passes.prefix_hits_total,
            paused=self.scheduler.num_paused,
            weight_version=self.weight_version,
            draft_tokens_total=self._passes.drafter.draft_tokens_total,
            accepted_draft_tokens_total=self._passes.drafter.accepted_draft_tokens_total,
        )

    def check_integrity(self) -> None:
        """Assert that scheduler, allocator and tables are consistent."""
        self.scheduler.check_integrity()
        self.context.check_integrity([self._sequence(request_id) for request_id in self.scheduler.running_ids])

    def _report(self, started: float) -> StepResult:
        finished, partials = self.pop_reports()
        return {
            "active_request_ids": self.scheduler.running_ids,
            "finished_request_records": finished,
            "step_time": time.perf_counter() - started,
            "cuda_graph_request_count": self._passes.graph_size,
            "partial_outputs": partials,
        }

    def _sequence(self, request_id: int) -> Sequence:
        sequence = self._requests[request_id].sequence
        assert sequence is not None
        return sequence

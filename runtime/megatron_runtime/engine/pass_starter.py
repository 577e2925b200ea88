"""Begins passes: on a CUDA graph or eagerly, on this rank and on the others, with the tokens that this rank samples."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.config import AsyncScheduleMode
from megatron_runtime.engine.context import DynamicInferenceContext, LogProbRows
from megatron_runtime.engine.graph_sizes import GraphSize
from megatron_runtime.engine.next_pass import BegunPass, NextPass
from megatron_runtime.engine.pass_graphs import PassGraphs
from megatron_runtime.engine.request_book import RequestBook
from megatron_runtime.engine.sampling.sampler import NO_TOKEN
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.shared_output import PendingOutput, SharedOutputs
from megatron_runtime.engine.text_generation_controller import StepOutput, TextGenerationController
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.routing_tape import RoutingTape


class PassStarter:
    """Begins the passes of one engine.

    Args:
        controller: Runs the model and samples.
        context: The KV cache and its tables.
        scheduler: The scheduler over the context's allocator.
        requests: The open requests.
        graphs: The CUDA graphs; None: all passes run eagerly.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        scheduler: Scheduler,
        requests: RequestBook,
        graphs: PassGraphs | None,
    ) -> None:
        self._controller = controller
        self._context = context
        self._scheduler = scheduler
        self._requests = requests
        self._graphs = graphs
        self._outputs = SharedOutputs(controller.model.ranks)
        self._next = None if graphs is None else NextPass(graphs, context, scheduler, controller.model.ranks)
        self._begins_next = context.config.async_sched_mode is AsyncScheduleMode.ASYNC
        self.graph_size: int | None = None
        """Requests of the CUDA graph of the last pass, with padding; None: it ran eagerly."""

    @property
    def admits(self) -> bool:
        """Whether new requests may begin with the next pass. What has begun has no room for them."""
        return self._next is None or not self._next.has_begun or not self._scheduler.num_running

    def begin_next(self) -> None:
        """Begin the pass that follows the last one, if that is possible and permitted."""
        if self._next is not None and self._begins_next:
            self._next.begin()

    def drop_next(self) -> None:
        """Drop the pass that has begun before its tokens were known, if there is one."""
        if self._next is not None:
            self._next.drop()

    def check_outputs(self) -> None:
        """As `SharedOutputs.check`, of the passes that are settled. To be called before each pass."""
        self._outputs.check()

    def begin(self, slices: list[SequenceSlice], started: float) -> PendingOutput:
        """Begin a pass; its output is to be awaited in the order of the passes, and may have the seconds since a time
        of the context's clock."""
        begun = None if self._next is None else self._next.begun_for(slices)
        size = self._size_for(slices) if begun is None else begun.size
        self.graph_size = None if size is None else size.requests
        if size is not None:
            return self._begin_captured(slices, size, begun)
        self.drop_next()
        batch = self._context.forward_batch(slices)
        tape = self._context.routing.tape(slices, self._context.device)
        if self._samples(slices):
            sampled = self._sample(batch, slices, tape)
            output = replace(sampled, seconds=self._context.clock() - started)
            self._context.routing.store(batch.slots, tape)
            known = self._outputs.own(slices, lambda: output)()  # Other stages wait for it.
            return lambda: known
        self._controller.model(batch, self._context.kv_cache, tape)
        if tape is not None:
            self._controller.model.ranks.await_device()
        self._context.routing.store(batch.slots, tape)
        return self._outputs.awaited(slices)

    def _size_for(self, slices: list[SequenceSlice]) -> GraphSize | None:
        return None if self._graphs is None else self._graphs.size_for(slices)

    def _samples(self, slices: list[SequenceSlice]) -> bool:
        """Whether this rank samples a pass."""
        ranks = self._controller.model.ranks
        return ranks.position.samples or (ranks.has_logits and self._all_can_sample(slices))

    def _all_can_sample(self, slices: list[SequenceSlice]) -> bool:
        """Whether all ranks that have the logits can sample a pass. With a grammar one does it for all: the schedule
        depends on the times that it takes to compute the masks.
        """
        if self._controller.model.ranks.position.sizes.ranks_per_replica_group == 1:
            return True
        return all(self._requests[part.sequence.request_id].params.grammar is None for part in slices)

    def _begin_captured(self, slices: list[SequenceSlice], size: GraphSize, begun: BegunPass | None) -> PendingOutput:
        assert self._graphs is not None, "graphs have sizes"
        assert self._next is not None, "there are graphs"
        if not self._samples(slices):
            self._next.drop()
            self._graphs.begin(slices, size, self._context.sampling_rules(slices, with_edits=False))
            return self._outputs.awaited(slices)
        rules = self._context.sampling_rules(slices, known=None if begun is None else begun.rules)
        wanted = self._log_prob_rows(slices) if begun is None else None  # A pass that has begun reports none.
        if not rules.edits and wanted is None and self._all_can_sample(slices):
            return self._outputs.own(slices, self._next.run(slices, size, rules))
        assert begun is None or rules is not begun.rules, "its penalties would count the tokens again"
        self._next.drop()
        captured = self._graphs.begin(slices, size, rules)
        output = self._with_dead_ends(self._controller.run_captured(captured, rules, wanted), slices)
        return self._outputs.own(slices, lambda: output)

    def _sample(self, batch: ForwardBatch, slices: list[SequenceSlice], tape: RoutingTape | None) -> StepOutput:
        output = self._controller.run(
            batch,
            self._context.kv_cache,
            self._context.sampling_rules(slices),
            self._context.sampled_logit_rows(slices),
            self._log_prob_rows(slices),
            tape,
            self._context.hidden_pool(slices),
        )
        return self._with_dead_ends(output, slices)

    def _log_prob_rows(self, slices: list[SequenceSlice]) -> LogProbRows | None:
        if not any(part.num_log_probs for part in slices):
            return None
        top_n = max(self._requests[part.sequence.request_id].params.top_n_logprobs for part in slices)
        return self._context.log_prob_rows(slices, top_n)

    def _with_dead_ends(self, output: StepOutput, slices: list[SequenceSlice]) -> StepOutput:
        dead_ends = self._dead_ends(slices, output.tokens)
        return replace(output, dead_ends=dead_ends) if dead_ends else output

    def _dead_ends(self, slices: list[SequenceSlice], tokens: list[int]) -> dict[int, str]:
        """Grammars without a valid next token; only the sampling rank has the state of the grammars."""
        if NO_TOKEN not in tokens:
            return {}
        guides = (self._requests[part.sequence.request_id].guide for part in slices if part.samples)
        rows = enumerate(zip(tokens, guides, strict=True))
        return {row: guide.failure for row, (token, guide) in rows if token == NO_TOKEN and guide and guide.failure}

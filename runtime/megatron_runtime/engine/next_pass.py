"""Decode passes that begin before the host knows the tokens of the passes before them.

To settle a pass and to schedule the next one takes the host up to a millisecond, in which the device would have nothing
to do. So once a pass has begun on a CUDA graph, the next one is begun as well, as if each request went on: it takes its
tokens from the device. The host then settles the first one and schedules as always. If the scheduled pass consists of
rows that have begun, its tokens come from them; the other rows, of requests that have ended, are dropped. Otherwise the
pass is begun as always, and what has begun was in vain: it has written keys and values that are now written again, or
that belong to blocks which their next owners write to later.
"""

from __future__ import annotations

from collections.abc import Sequence as Slices
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.graph_sizes import GraphSize
from megatron_runtime.engine.pass_graphs import PassGraphs
from megatron_runtime.engine.sampling.penalties import are_equal
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.sequence_rows import SampledTokens, SequenceRows
from megatron_runtime.engine.shared_output import PendingOutput
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.model.device_memory import is_device_shortage
from megatron_runtime.parallel.ranks import Ranks

if TYPE_CHECKING:
    from megatron_runtime.gpu.arriving_tokens import ArrivingTokens


@dataclass(frozen=True)
class BegunPass:
    """A pass whose tokens are sampled without edits, except for penalties whose tokens the device counts."""

    slices: Slices[SequenceSlice]
    """Those that sample."""
    rules: SamplingRules
    """Of the slices."""
    places: NDArray[np.intp]
    """Of their tokens among those on the device."""
    tokens: ArrivingTokens
    size: GraphSize
    sequences: SequenceRows | None = None
    """Of the slices, after the pass; None: not known yet."""

    def rows_of(self, slices: Slices[SequenceSlice], rules: SamplingRules) -> NDArray[np.intp] | None:
        """Where these slices are among those of the pass, which has them with these rules; None if it has not."""
        rows = np.arange(len(slices))
        if rules is self.rules:
            return rows
        if slices != self.slices:
            numbers = {part: number for number, part in enumerate(self.slices)}
            rows = np.fromiter((numbers.get(part, -1) for part in slices), np.intp, len(slices))
            if (rows < 0).any():
                return None
        are_alike = are_equal(self.rules.penalties, rows, rules.penalties)
        return rows if are_alike and _samples_alike(self.rules.take(rows), rules) else None


def _samples_alike(one: SamplingRules, other: SamplingRules) -> bool:
    """Whether these rules without edits give the same tokens. 0 disables a truncation, as no array of it does."""
    values, others = ({type(each): each.values for each in rules.truncations} for rules in (one, other))
    return (
        np.array_equal(one.temperature, other.temperature)
        and np.array_equal(one.keys, other.keys)
        and all(np.all(values.get(kind, 0) == others.get(kind, 0)) for kind in values.keys() | others.keys())
    )


class NextPass:
    """Runs the passes of an engine that need neither log probabilities nor edits for which the host has to know tokens.

    Args:
        graphs: The CUDA graphs.
        context: The KV cache, and the tables of the running sequences.
        scheduler: Of these sequences; one pass is in flight at a time.
        ranks: The replica group, all of whose ranks begin the same passes.
    """

    def __init__(
        self, graphs: PassGraphs, context: DynamicInferenceContext, scheduler: Scheduler, ranks: Ranks
    ) -> None:
        self._is_single = ranks.position.sizes.ranks_per_replica_group == 1
        self._graphs = graphs
        self._context = context
        self._scheduler = scheduler
        self._last: BegunPass | None = None
        """The last pass of `run`, which the next one can follow."""
        self._begun: BegunPass | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a pass is begun that is not scheduled yet."""
        return self._begun is not None

    def begun_for(self, slices: Slices[SequenceSlice]) -> BegunPass | None:
        """The pass that has begun, if its slices are exactly these."""
        return self._begun if self._begun is not None and self._begun.slices == slices else None

    def drop(self) -> None:
        """Neither use what has begun, for which this waits, nor begin the pass that follows the last one."""
        if self._begun is not None:
            self._begun.tokens.wait()
        self._last = self._begun = None

    def run(self, slices: Slices[SequenceSlice], size: GraphSize, rules: SamplingRules) -> PendingOutput:
        """The output of a pass; begin it on the graph of this size, unless it has begun."""
        begun, self._last, self._begun = self._begun, None, None
        rows = None if begun is None else begun.rows_of(slices, rules)
        if begun is None or rows is None:
            tokens = self._graphs.begin(slices, size, rules).begin_sampling()
            places = np.arange(len(rules.keys))
        else:
            tokens, places = begun.tokens, begun.places[rows]
        if begun is not None and begun.rules is rules:
            self._last = begun
        elif len(places) == len(slices):
            self._last = BegunPass(slices, rules, places, tokens, size)
        return lambda: StepOutput(tokens.wait()[places].tolist(), None)

    def begin(self) -> None:
        """Begin the pass after the last one, if there are blocks and memory for it.

        Raises:
            RuntimeError: There is no memory for it, and the replica group has other ranks.
        """
        try:
            self._begin()
        except RuntimeError as error:
            if not self._is_single or not is_device_shortage(error):
                raise  # Several ranks: the others have begun it, and wait for this one.
            self.drop()

    def _begin(self) -> None:
        last, self._last = self._last, None
        if last is None or self._scheduler.num_paused:
            return
        slices, ended = self._scheduler.reserve_next(last.slices)
        if not slices or (size := self._graphs.decode_size(len(slices))) is None:
            return
        left = np.delete(np.arange(len(last.slices)), ended) if ended else slice(None)
        sequences = (last.sequences or SequenceRows.of(last.slices)).following(left)
        sampled = SampledTokens(last.places[left], sequences)
        if (rules := self._context.rules_for_sampled(sampled)) is None:
            return
        tokens = self._graphs.begin(slices, size, rules, sampled).begin_sampling()
        self._begun = BegunPass(slices, rules, np.arange(len(slices)), tokens, size, sequences)

"""Chooses how many tokens to draft by what drafts cost and yield."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from megatron_runtime.engine.scheduling.pass_time import PassTime

_FADING = 0.95
"""Weight of a draft relative to the next one."""
_LOSS = 0.02
"""Largest part of the time that may be lost to drafts in the long run."""
_FIRST_PASSES = 1
"""Passes without drafts whose time may be lost at first."""
_MOST_PASSES = 8
"""The same after gains."""
_PLAIN_INTERVAL = 64
"""Every so many passes, one without drafts is measured."""


class Goodput:
    """Permits as many drafts as give the most tokens per second (goodput; Liu et al. 2024), possibly none.

    A draft costs a row of the pass that verifies it, and its part of the passes of the draft model. Both times, and
    how often a draft behind right ones is right, are those of the latest passes, of which some have no drafts. While
    times are unknown, each sequence has one draft at most; where passes take no time, all drafts are permitted.

    Times and fractions change, so that drafts without an expected gain are tried again: one draft of one sequence, when
    the losses so far are at most 2 % of the time. Drafts that would lose more than that and earlier gains, if all of
    them were wrong, are not permitted, whatever is expected.

    Ranks in lock step note the same values, which the rank that samples measures, so that they permit the same drafts.
    """

    def __init__(self) -> None:
        self._passes = PassTime()
        self._rounds = PassTime()
        self._right = self._tried = 1.0
        self._gain: float | None = None
        """Seconds that drafts have gained, and may lose; None: no time is known yet."""
        self._passes_with_drafts = _PLAIN_INTERVAL
        """Since the last one without; at first, one without is due."""
        self.is_expected = True
        """Whether the last drafts are expected to gain time; else none are permitted, or a trial."""

    def permitted(self, rows: int, sampled: int, wanted: Many[int]) -> list[int]:
        """How many of the wanted drafts of each sequence a pass has, which samples ``sampled`` tokens without them, and
        has ``rows`` rows."""
        if not any(wanted):
            return list(wanted)
        if not self._passes.is_known:
            return [min(each, 1) for each in wanted]
        plain = self._passes.of(rows)
        if plain <= 0:
            return list(wanted)
        if self._passes_with_drafts >= _PLAIN_INTERVAL:
            return [0] * len(wanted)
        most = self._best(rows, sampled, wanted)
        self.is_expected = most > 0
        if most or self._may_lose(plain) < 0:
            return [min(most, each) for each in wanted]
        trial = next(index for index, each in enumerate(wanted) if each)
        return [int(index == trial) for index in range(len(wanted))]

    def _may_lose(self, plain: float) -> float:
        """Seconds, of which a pass without drafts takes ``plain``."""
        return _FIRST_PASSES * plain if self._gain is None else self._gain

    def _best(self, rows: int, sampled: int, wanted: Many[int]) -> int:
        """The number of drafts per sequence that gives the most tokens per second, of those that may all be wrong."""
        ending, deeper = Counter(wanted), sum(1 for each in wanted if each)
        tokens, seconds = float(sampled), self._passes.of(rows)
        row, chance, right = self._passes.of(rows + 1) - seconds, 1.0, self._right / self._tried
        best, highest = 0, tokens / seconds
        longest = seconds + self._may_lose(seconds)
        for length in range(1, max(wanted) + 1):
            chance *= right
            tokens += deeper * chance
            seconds += deeper * row + self._rounds.of(deeper)
            if seconds > longest:
                break
            if tokens / seconds > highest:
                best, highest = length, tokens / seconds
            deeper -= ending[length]
        return best

    def note_drafts(self, count: int, accepted: int) -> None:
        """Note how many drafts of a sequence were right; those behind the first wrong one were not tried."""
        tried = min(accepted + 1, count)
        fading = _FADING**tried
        self._right = self._right * fading + accepted
        self._tried = self._tried * fading + tried

    def note_pass(
        self,
        *,
        rows: int,
        sampled: int,
        drafts: int,
        accepted: int,
        seconds: float | None,
        rounds: Many[tuple[int, float]],
    ) -> None:
        """Note a pass.

        Args:
            rows: Its rows without drafts.
            sampled: Its sampled tokens without drafts.
            drafts: All its drafts.
            accepted: Those that were right.
            seconds: Without the draft model; None: not comparable, because it computes prompts.
            rounds: Rows and seconds of each pass of the draft model.
        """
        if seconds is not None:
            self._passes.note(rows + drafts, seconds)
        self._passes_with_drafts = self._passes_with_drafts + 1 if drafts else 0
        for each in rounds:
            self._rounds.note(*each)
        plain = self._passes.of(rows)
        if plain <= 0:
            return
        spent = self._passes.of(rows + drafts) - plain + sum(self._rounds.of(each) for each, _ in rounds)
        earned = plain * accepted / sampled if sampled else 0.0
        first = _FIRST_PASSES * plain
        gain = self._may_lose(plain) + earned - spent
        if gain < first:
            gain = min(gain + _LOSS * plain, first)
        self._gain = min(gain, _MOST_PASSES * plain)

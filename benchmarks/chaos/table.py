"""The table of all trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chaos.outcome import SeenError
from chaos.trial import Answers, Trial

COLUMNS = [
    "what happens",
    "requests",
    "correct",
    "retried by the client, unseen",
    "errors seen",
    "streams interrupted",
    "longest, s",
    "ratio to no failure",
    "until all is Ready, s",
]


def rows(trials: Sequence[Trial], baseline: Trial, answers: Answers) -> list[list[str]]:
    """Header and rows; ``baseline`` is the trial without a fault, which the others are compared with."""
    return [COLUMNS, *(_row(trial, baseline, answers) for trial in [baseline, *trials])]


def verdict(trials: Sequence[Trial], answers: Answers) -> list[str]:
    """Violations: wrong answers, requests without an answer, errors that do not permit a retry."""
    found = []
    for trial in trials:
        final = [error for error in [*trial.errors, *trial.interrupted] if not error.retryable]
        for count, what in (
            (trial.wrong(answers), "wrong answers"),
            (trial.unanswered, "requests without an answer"),
            (len(final), f"errors that do not permit a retry ({_described(final)})"),
        ):
            if count:
                found.append(f"{trial.fault.words}: {count} {what}")
    return found


def _row(trial: Trial, baseline: Trial, answers: Answers) -> list[str]:
    return [
        trial.fault.words,
        str(len(trial.outcomes)),
        str(trial.correct(answers)),
        str(trial.retried),
        _described(trial.errors),
        _described(trial.interrupted),
        f"{trial.longest:.1f}",
        f"{trial.longest / baseline.longest:.1f}",
        f"{trial.seconds_unhealthy:.1f}" if trial.problems else "stayed",
    ]


def _described(errors: Sequence[SeenError]) -> str:
    counted = Counter(f"{error}" if error.retryable else f"{error} (final)" for error in errors)
    return ", ".join(f"{count} {words}" for words, count in sorted(counted.items())) or "0"

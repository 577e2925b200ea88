"""The table of all trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chaos.outcome import SeenError
from chaos.trial import Answers, Trial

COLUMNS = [
    "what happens",
    "requests",
    "right",
    "retried by the client, unseen",
    "errors seen",
    "streams broken off",
    "longest, s",
    "to undisturbed",
    "until all is Ready, s",
]


def rows(trials: Sequence[Trial], undisturbed: Trial, answers: Answers) -> list[list[str]]:
    """Header and cells; ``undisturbed`` is what each longest request is compared with, and has a row of its own."""
    return [COLUMNS, *(_row(trial, undisturbed, answers) for trial in [undisturbed, *trials])]


def verdict(trials: Sequence[Trial], answers: Answers) -> list[str]:
    """What must not be: a wrong answer, a request never answered, an error that says nothing about asking again."""
    found = []
    for trial in trials:
        final = [error for error in [*trial.errors, *trial.broken] if not error.retryable]
        for count, what in (
            (trial.wrong(answers), "wrong answers"),
            (trial.unanswered, "requests without an answer"),
            (len(final), f"errors that forbid asking again ({_told(final)})"),
        ):
            if count:
                found.append(f"{trial.fault.words}: {count} {what}")
    return found


def _row(trial: Trial, undisturbed: Trial, answers: Answers) -> list[str]:
    return [
        trial.fault.words,
        str(len(trial.outcomes)),
        str(trial.right(answers)),
        str(trial.retried),
        _told(trial.errors),
        _told(trial.broken),
        f"{trial.longest:.1f}",
        f"{trial.longest / undisturbed.longest:.1f}",
        f"{trial.seconds_amiss:.1f}" if trial.lacking else "stayed",
    ]


def _told(errors: Sequence[SeenError]) -> str:
    counted = Counter(f"{error}" if error.retryable else f"{error} (final)" for error in errors)
    return ", ".join(f"{count} {words}" for words, count in sorted(counted.items())) or "0"

"""The metrics that operator, activators and runtime export."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from metrics_reference import of_a_frontend, of_a_pod, of_an_activator, of_the_operator

BY_SCRAPING = ("namespace", "pod", "container", "job", "instance", "endpoint")
"""Labels that Prometheus adds."""
BY_THE_POD_MONITOR = "megatroninference"


@dataclass
class Series:
    """The labels of a series, with their observed values."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def has(self, label: str, value: str, *, as_regex: bool = False) -> bool:
        """Whether a matcher for this label can match."""
        if label in BY_SCRAPING or label == BY_THE_POD_MONITOR:
            return True
        return any(re.fullmatch(value, each) if as_regex else value == each for each in self.labels[label])


def exported() -> dict[str, Series]:
    """All series by name."""
    found: dict[str, Series] = defaultdict(Series)
    for metric in (*of_the_operator(), *of_an_activator(), *of_a_pod(), *of_a_frontend()):
        for sample in metric.samples:
            series = found[sample.name]
            for label, value in sample.labels.items():
                series.labels[label].add(value)
    return dict(found)

"""What the operator and the runtime really export to Prometheus."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from megatron_operator.metrics import Meters
from megatron_runtime.launch.metrics import PodCollector
from megatron_runtime.launch.pod_state import PodFacts, RankState, ReplicaState
from megatron_runtime.server.metrics import FrontendMetrics

ANY = "500"
"""Stands for the value of a label that only requests give: a status, among others."""
BY_SCRAPING = ("namespace", "pod", "container", "job", "instance", "endpoint")
"""Labels that Prometheus adds to what it scrapes."""
BY_THE_POD_MONITOR = "megatroninference"


@dataclass
class Series:
    """The labels of a series, and the values that each was seen with."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def has(self, label: str, value: str, *, as_regex: bool = False) -> bool:
        """Whether a matcher for it can ever match."""
        if label in BY_SCRAPING or label == BY_THE_POD_MONITOR:
            return True
        return any(re.fullmatch(value, each) if as_regex else value == each for each in self.labels[label])


def exported() -> dict[str, Series]:
    """All series, by name."""
    found: dict[str, Series] = defaultdict(Series)
    for metric in (*_of_the_operator(), *_of_a_pod(), *_of_a_frontend()):
        for sample in metric.samples:
            series = found[sample.name]
            for label, value in sample.labels.items():
                series.labels[label].add(value)
    return dict(found)


def _of_the_operator() -> Iterable[Metric]:
    return Meters().registry.collect()


def _of_a_pod() -> Iterable[Metric]:
    replicas = (ReplicaState(group=0, state="RUNNING"),)
    facts = PodFacts(is_leader=True, engine_state="RUNNING", replicas=replicas, ranks={0: RankState(0)})
    return PodCollector(lambda: facts).collect()


def _of_a_frontend() -> Iterator[Metric]:
    for metric in vars(FrontendMetrics()).values():
        assert isinstance(metric, MetricWrapperBase)
        if metric._labelnames:
            metric.labels(*(ANY for _ in metric._labelnames))
        yield from metric.collect()

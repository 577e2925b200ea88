"""Watches the health of the resource, the operator, the node and the API server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Self

from chart_support.helm import NAMESPACE
from kubernetes import client, config
from node_support.stage import OPERATOR_SELECTOR
from urllib3.exceptions import HTTPError

from chaos.site import Site

EVERY = 0.3
LONGEST_CALL = 2.0


@dataclass(frozen=True)
class Health:
    """The health at a time: ``at`` is as ``time.time``; ``problems`` is empty if everything is healthy."""

    at: float
    problems: str


class HealthWatch:
    """A context manager that appends to ``history``."""

    def __init__(self, site: Site) -> None:
        self.history: list[Health] = []
        self._site = site
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        configuration = client.Configuration()
        config.load_kube_config(str(site.node.kubeconfig), client_configuration=configuration, persist_config=False)
        configuration.retries = False
        self._connection = client.ApiClient(configuration)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def has_rested(self, seconds: float) -> bool:
        """Whether everything has been healthy for this time."""
        since = time.time() - seconds
        last = [look.problems for look in self.history if look.at > since]
        return bool(last) and not any(last)

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                problems = self._lacking()
            except (client.ApiException, HTTPError):
                problems = "the API server does not answer"
            self.history.append(Health(time.time(), problems))

    def _lacking(self) -> str:
        site, limit = self._site, {"_request_timeout": LONGEST_CALL}
        resources, core = client.CustomObjectsApi(self._connection), client.CoreV1Api(self._connection)
        place = ("inference.megatron.dev", "v1alpha1", site.namespace, "megatroninferences", site.name)
        status = resources.get_namespaced_custom_object(*place, **limit).get("status") or {}
        ready, wanted = status.get("ready"), f"{site.replicas}/{site.replicas}"
        if status.get("phase") != "Running" or ready != wanted:
            return f"the resource is {status.get('phase')}, {ready} are ready"
        if not _is_ready(core.read_node(site.node.name, **limit)):
            return "the node is not ready"
        operators = core.list_namespaced_pod(NAMESPACE, label_selector=OPERATOR_SELECTOR, **limit).items
        return "" if any(map(_is_ready, operators)) else "the operator is not ready"


def _is_ready(thing: client.V1Node | client.V1Pod) -> bool:
    """Whether a node or pod has the condition Ready."""
    conditions = thing.status.conditions or []
    return any(each.type == "Ready" and each.status == "True" for each in conditions)

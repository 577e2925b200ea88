"""kopf handlers: each event of a resource or of one of its children wakes the loop of that resource.

The operator uses event handlers only, so kopf writes neither finalizers nor annotations nor progress into resources.
Kubernetes' garbage collection deletes the children, with or without a running operator.

Run it with ``megatron-operator run`` or ``kopf run -m megatron_operator.handlers``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import kopf

from megatron_operator import names
from megatron_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from megatron_operator.kubernetes import kueue_workloads
from megatron_operator.kubernetes.api_server import (
    CORDONED,
    ApiServer,
    ServerError,
    ServerRefusal,
    group_version_plural,
)
from megatron_operator.kubernetes.leader_election import LeaderElection
from megatron_operator.kubernetes.lease import LeaseName, LeaseTimings
from megatron_operator.kubernetes.null_storage import NullDiffBaseStorage, NullProgressStorage
from megatron_operator.kubernetes.resource_loops import ResourceLoops
from megatron_operator.kubernetes.watched_kinds import WatchedKinds
from megatron_operator.metrics import Meters, MetricsServer
from megatron_operator.observed_state import AdapterError
from megatron_operator.settings import LEASE_SECONDS_VARIABLE, LEASE_VARIABLE, WATCH_SILENCE_VARIABLE, Settings

METRICS_HOST_VARIABLE = "MEGATRON_OPERATOR_METRICS_HOST"
METRICS_PORT_VARIABLE = "MEGATRON_OPERATOR_METRICS_PORT"
logger = logging.getLogger("megatron_operator")

PAUSE = 1.0
"""Seconds before kopf restarts after it ended on its own."""
OURS = {names.NAME_LABEL: kopf.PRESENT}
CHILDREN = tuple(map(group_version_plural, ("Pod", "Service", "NetworkPolicy", *names.ROUTE_KINDS)))
"""Kinds that kopf watches besides the resource. Secrets are not among them: that would need the right to list all
Secrets."""

OPTIONAL_KINDS = ("HTTPRoute", "InferencePool")
"""Watched kinds that a cluster may not have."""


@dataclass(frozen=True)
class Options:
    """Options of the operator. No ``namespaces`` means all namespaces.

    Without ``metrics_port`` the operator serves neither metrics nor ``/healthz``. Without a ``lease`` there is no
    leader election. A watch without an event for ``watch_silence`` seconds is restarted; API servers send a bookmark
    each minute.
    """

    namespaces: tuple[str, ...] = ()
    metrics_host: str = "0.0.0.0"
    metrics_port: int | None = None
    lease: LeaseName | None = None
    lease_timings: LeaseTimings = field(default_factory=LeaseTimings)
    watch_silence: int = 70

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Options for ``kopf run``, which takes the namespaces from its own flags. Raises ValueError."""
        lease = environment.get(LEASE_VARIABLE)
        return cls(
            metrics_host=environment.get(METRICS_HOST_VARIABLE) or cls.metrics_host,
            metrics_port=_number(environment, METRICS_PORT_VARIABLE, "a port number like 8080"),
            lease=LeaseName.parse(lease) if lease else None,
            watch_silence=_number(environment, WATCH_SILENCE_VARIABLE, "whole seconds like 70") or cls.watch_silence,
            lease_timings=LeaseTimings(
                _number(environment, LEASE_SECONDS_VARIABLE, "whole seconds like 15") or LeaseTimings.seconds
            ),
        )


def _number(environment: Mapping[str, str], variable: str, wanted: str) -> int | None:
    text = environment.get(variable) or None
    if text is not None and not text.isdigit():
        raise ValueError(f"{variable}: {text} is not a number; set it to {wanted}")
    return None if text is None else int(text)


class RetryForever(Iterable[float]):
    """Seconds between attempts to reach the API server. Watches survive an outage of any length."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8, 13), itertools.repeat(20))


def run(options: Options, *, verbose: bool, json_log: bool = False) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises errors of the start: AdapterError without a cluster.

    kopf ends on some transient answers, such as a 404 for the CustomResourceDefinition from an API server that has just
    started. The operator then starts it again.
    """
    kopf.configure(verbose=verbose, log_format=kopf.LogFormat.JSON if json_log else kopf.LogFormat.FULL)
    namespaces = options.namespaces
    while True:
        asyncio.run(_wait_for_cluster())
        watched = WatchedKinds()
        memo = kopf.Memo(options=options, watched=watched)
        try:
            kopf.run(
                clusterwide=not namespaces,
                namespaces=namespaces,
                standalone=True,
                insights=watched.insights,
                memo=memo,
            )
        except Exception as error:
            if "loops" not in memo:
                raise
            logger.warning("the watches ended and restart: %r", error)
            time.sleep(PAUSE)
        else:
            return


async def _wait_for_cluster() -> None:
    """Returns when the API server answers, which kopf would log as an unexpected error at each attempt otherwise.

    Raises AdapterError without a usable kubeconfig.
    """
    # The first process of a container ignores the signal without a handler.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, 0)
    api = await ApiServer.connect()
    try:
        for pause in RetryForever():
            try:
                await api.knows(KIND)
            except ServerError as error:
                logger.warning("%s; the next attempt is in %d s", error, pause)
                await asyncio.sleep(pause)
            except ServerRefusal:
                return  # It answers; what the operator needs is checked afterwards.
            else:
                return
    finally:
        await api.close()


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Connect to the API server, serve metrics, and configure kopf."""
    options: Options = memo.get("options") or Options.from_environment()
    configure(settings, options)
    reduce_logging()
    meters = Meters()
    api = await _connected(options)
    memo.metrics_server = MetricsServer(meters.registry)
    if options.metrics_port is not None:
        await memo.metrics_server.start(options.metrics_host, options.metrics_port)
    # ``kopf run`` does not accept a list of kinds. There, kopf watches a kind that appears later only if it discovers
    # it.
    watched: WatchedKinds = memo.get("watched") or WatchedKinds()
    operator_settings = Settings.from_environment()
    memo.api, memo.loops = api, ResourceLoops(api, operator_settings, meters, watched.add, options.namespaces)
    if await memo.loops.may_read_nodes():
        watch_nodes()
    else:
        logger.info("nodes cannot be read: replica groups stay on cordoned nodes until their pods are evicted")
    memo.discovery_task = asyncio.create_task(watched.keep(KIND, api.knows), name=f"discovery of {KIND}")
    if options.lease is None:
        memo.loops.start_leading()
        return
    memo.election = LeaderElection(
        api, options.lease, options.lease_timings, memo.loops.start_leading, memo.loops.stop_leading
    )
    api.check_may_act = memo.election.check
    memo.election_task = asyncio.create_task(memo.election.run(), name=f"leader election by Lease {options.lease}")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop all loops and release the Lease last. Pods and resources stay as they are."""
    if "loops" not in memo:
        return
    await _end_watchers()
    memo.discovery_task.cancel()
    await asyncio.gather(memo.discovery_task, return_exceptions=True)
    if "election_task" in memo:
        memo.election_task.cancel()
        await asyncio.gather(memo.election_task, return_exceptions=True)
    await memo.loops.close()
    if "election" in memo:
        await memo.election.release_lease()
    await memo.api.close()
    await memo.metrics_server.stop()


async def _end_watchers() -> None:
    """Cancel all watchers first: when one fails, kopf closes the session of the others, and may then wait for one
    forever."""
    watchers = [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for ")]
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)


@kopf.on.event(GROUP, VERSION, PLURAL)
async def resource_changed(memo: kopf.Memo, event: kopf.RawEvent, type: str | None, **_: Any) -> None:
    """The resource was added, modified or deleted."""
    memo.loops.resource_changed(dict(event["object"]), gone=type == "DELETED")


async def child_changed(
    memo: kopf.Memo, event: kopf.RawEvent, type: str | None, namespace: str | None, labels: kopf.Labels, **_: Any
) -> None:
    """A child was added, modified or deleted."""
    assert namespace is not None
    is_kept = type != "DELETED" and kueue_workloads.keeps(event["object"])
    (memo.loops.kept_by_kueue if is_kept else memo.loops.wake)(namespace, labels[names.NAME_LABEL])


async def node_changed(memo: kopf.Memo, name: str | None, type: str | None, **_: Any) -> None:
    """A node was cordoned, changed while it is cordoned, or is no longer cordoned: the watch selects cordoned nodes."""
    assert name is not None
    memo.loops.node_changed(name, is_cordoned=type != "DELETED")


@functools.cache
def watch_nodes() -> None:
    """Watch cordoned nodes. kopf finds the handler after the start, and repeats a watch that is forbidden for ever."""
    kopf.on.event(*group_version_plural("Node"))(node_changed)


for child in CHILDREN:
    kopf.on.event(*child, labels=OURS)(child_changed)


def configure(settings: kopf.OperatorSettings, options: Options) -> None:
    """Configure kopf: finite timeouts, unlimited retries, no events and no peering."""
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NullDiffBaseStorage()
    settings.persistence.progress_storage = NullProgressStorage()
    settings.peering.standalone = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = RetryForever()
    # The other clients of the API server, such as kubectl, honour the proxy variables as well.
    settings.networking.trust_env = True
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = options.watch_silence
    for child in CHILDREN:
        settings.watching.label_selectors[child] = names.NAME_LABEL
    settings.watching.field_selectors[group_version_plural("Node")] = CORDONED
    # With a Role in each namespace and no ClusterRole, the operator may not scan for kinds.
    settings.scanning.disabled = bool(options.namespaces)


def reduce_logging() -> None:
    """Log what the loops report and nothing else, unless --verbose is set."""
    logging.getLogger("kopf._core.reactor.observation").addFilter(is_news)
    if logging.getLogger().level > logging.DEBUG:
        for chatty in ("httpx", "kopf.objects"):
            logging.getLogger(chatty).setLevel(logging.WARNING)


def is_news(record: logging.LogRecord) -> bool:
    """False for kopf's warning that the Gateway API or its extension is missing; most clusters do not need them."""
    words = record.getMessage()
    missing = sum(f"'{group_version_plural(kind)[2]}'" in words for kind in OPTIONAL_KINDS)
    return not (words.startswith("Unresolved resources") and words.count("Selector(") == missing)


async def _connected(options: Options) -> ApiServer:
    """Check that the kind is defined: without scanning, kopf would silently watch nothing."""
    try:
        api = await ApiServer.connect()
        for namespace in options.namespaces:
            await api.list("MegatronInference", namespace, {})
    except AdapterError as error:
        raise kopf.PermanentError(f"cannot start: {error}; is the CustomResourceDefinition applied?") from error
    return api

"""A cluster in memory: pods that start, fail and hang, an engine with signals, and a clock that tests advance."""

from __future__ import annotations

from dataclasses import replace

from planning_support.signals import ALLOWED_FROM, ARRIVES_AT, IN_PROGRESS_REASONS

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Cache, Lifecycle
from megatron_operator.downloads import DownloadPhase, ObservedDownload
from megatron_operator.leader_selection import current_leader
from megatron_operator.lifecycle import SETTLED_STATE
from megatron_operator.observed_state import (
    Action,
    ActionRefused,
    ApplyChild,
    CreatePod,
    CreateSecret,
    DeleteChild,
    DeletePod,
    EngineState,
    Failure,
    Loading,
    Manifest,
    ObservedEngine,
    ObservedPod,
    ObservedReplica,
    ObservedState,
    PodPhase,
    SendRole,
    SendSignal,
    SetRoleLabel,
    Signal,
    SignalRefused,
)


class SimulatedCluster:
    """A ``ClusterAdapter`` whose cluster changes only by the methods that tests call."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.pods: dict[str, ObservedPod] = {}
        self.children: dict[str, str] = {}
        self.downloads: dict[str, ObservedDownload] = {}
        """The download Jobs by name; tests change them."""
        self.cache_nodes: tuple[str, ...] | None = ()
        self.taken: set[str] = set()  # ``Kind/name`` of objects of other owners
        self.unknown_fields: dict[str, object] = {}
        self.has_room = True  # the node of a new pod
        self.still: dict[str, float] = {}
        """Pods with stopped processes, and the time since when."""
        self._cut_off_since: float | None = None
        self.engine_state: EngineState | None = None
        self.auto_suspended = False
        self.refused: list[Signal] = []
        """Signals that the state of the engine did not allow."""
        self._wishes: dict[str, Lifecycle] = {}
        self._born_leaders: dict[str, int] = {}

    async def dropped_fields(self, _pod: Manifest, _override: Manifest) -> dict[str, object]:
        """Fields unknown to the cluster."""
        return self.unknown_fields

    async def observe(self, _name: str, _namespace: str, _cache: Cache | None = None) -> ObservedState:
        """The observation of an adapter."""
        return self.observed()

    async def apply(self, _name: str, _namespace: str, action: Action) -> None:
        """The action of an adapter."""
        self.carry_out(action)

    def observed(self) -> ObservedState:
        """The current observed state."""
        return ObservedState(
            now=self.now,
            pods=tuple(sorted(map(self._as_seen, self.pods.values()), key=lambda pod: pod.name)),
            engine=self._engine(),
            children=dict(self.children),
            taken=frozenset(self.taken),
            downloads=tuple(self.downloads.values()),
            cache_nodes=self.cache_nodes,
        )

    def carry_out(self, action: Action) -> None:
        """One action, idempotent."""
        match action:
            case ApplyChild(manifest) if names.child_key(manifest) in self.taken:
                raise ActionRefused(f"{names.child_key(manifest)} exists and has another owner")
            case ApplyChild(manifest):
                self._apply(manifest)
            case DeleteChild(kind, name):
                self.children.pop(f"{kind}/{name}", None)
                self.downloads.pop(name, None)
            case CreateSecret(manifest):
                self.children.setdefault(names.child_key(manifest), "")
            case CreatePod(manifest):
                self._create(manifest)
            case DeletePod(name, uid, grace_seconds):
                if name in self.pods and self.pods[name].uid == uid:
                    self.delete(name, grace_seconds)
            case SendSignal(signal):
                self._take(signal)
            case SetRoleLabel(name, uid, leader, epoch):
                if name in self.pods and self.pods[name].uid == uid:
                    self.change(name, leader=leader, epoch=self.pods[name].epoch if epoch is None else epoch)
            case SendRole(address, leads, epoch, lifecycle):
                self._tell(address, leads, epoch, lifecycle)

    @property
    def reachable(self) -> bool:
        """Whether the operator reaches the leader; engines and frontends always do."""
        return self._cut_off_since is None

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        if reachable != self.reachable:
            self._cut_off_since = None if reachable else self.now

    def start(self, name: str) -> None:
        """The pod's next step: scheduled, loading, registering, serving and ready; or the end of its deletion.

        Without a coordinator, pods stay in registering.
        """
        pod = self.pods[name]
        if pod.deleting:
            self.remove(name)
        elif name in self.still or (pod.startup_since is None and not self.has_room):
            return
        elif pod.phase is PodPhase.PENDING:
            leads = self._born_leaders.pop(name, None)
            told = 0 if leads is None else leads
            self.change(
                name,
                phase=PodPhase.RUNNING,
                waiting=None,
                startup_since=self.now if pod.startup_since is None else pod.startup_since,
                rank_phase="Loading",
                loading=Loading(1, 10),
                reports_leader=leads is not None,
                known_epoch=told,
            )
        elif pod.phase is PodPhase.RUNNING and not pod.ready:
            if self._is_coordinated():
                self.change(name, ready=True, rank_phase="Serving", ready_changed_at=self.now)
                if pod.reports_leader and self.engine_state is None:
                    self.engine_state = SETTLED_STATE[self._wishes[name]]
            else:
                self.change(name, rank_phase="Registering")

    def schedule(self, name: str) -> None:
        """The pod is bound to a node; its kubelet has not reported yet."""
        self.change(name, waiting=None, startup_since=self.now)

    def start_all(self) -> None:
        """One step for every pod."""
        for name in list(self.pods):
            self.start(name)

    def run_up(self) -> None:
        """Every pod starts as far as it can."""
        for _ in range(3):
            self.start_all()

    def fail(self, name: str, exit_code: int = 1, reason: str = "RankFailed") -> None:
        """The pod's processes end."""
        failure = Failure(reason, f"rank 0 ended with {exit_code}", rank=0, exit_code=exit_code)
        self.change(
            name,
            phase=PodPhase.FAILED,
            ready=False,
            finished_at=self.now,
            failure=failure,
            rank_phase=None,
            reports_leader=None,
        )
        self._notice_loss()

    def evict(self, name: str) -> None:
        """The eviction API: the pod is marked and deleted."""
        words = "Eviction API: evicting"
        self.change(name, disruption=Failure("EvictionByEvictionAPI", words, disruption=True))
        self.delete(name)

    def preempt(self, name: str) -> None:
        """The kubelet ends the pod for one with a higher priority; the object is kept."""
        failure = Failure("Preempting", "Preempted in order to admit critical pod", disruption=True)
        self.fail(name)
        self.change(name, failure=failure, disruption=failure)

    def delete(self, name: str, grace_seconds: int = 30) -> None:
        """The deletion is requested; the kubelet has not acted yet."""
        pod = self.pods[name]
        if pod.finished and grace_seconds == 0:
            self.remove(name)
        elif not pod.deleting:
            self.change(name, deletion_deadline=self.now + grace_seconds, ready=False)

    def remove(self, name: str) -> None:
        """The pod is deleted."""
        self.pods.pop(name)
        self.still.pop(name, None)
        self._notice_loss()

    def fall_asleep(self) -> None:
        """The engine had no requests for the idle time."""
        if self.engine_state is EngineState.RUNNING:
            self.engine_state, self.auto_suspended = EngineState.SUSPENDED, True

    def wake(self) -> None:
        """The engine gets a request."""
        if self.auto_suspended:
            self.engine_state, self.auto_suspended = EngineState.RUNNING, False

    def advance_engine(self) -> None:
        """The current transition ends."""
        if self.engine_state in ARRIVES_AT:
            self.engine_state = ARRIVES_AT[self.engine_state]

    def unready(self, name: str, **changes: object) -> None:
        """The readiness probe fails."""
        self.change(name, ready=False, ready_changed_at=self.now, **changes)

    def stand_still(self, name: str) -> None:
        """All processes of the pod are stopped; the kubelet has not detected it yet."""
        self.still[name] = self.now

    def go_on(self, name: str) -> None:
        """The processes continue."""
        self.still.pop(name, None)

    def change(self, name: str, **changes: object) -> None:
        """Changes any field of a pod."""
        self.pods[name] = replace(self.pods[name], **changes)  # type: ignore[arg-type]

    def live(self, group: int | None = None) -> list[ObservedPod]:
        """Pods that are not terminating."""
        pods = [pod for pod in self.pods.values() if not pod.finished and not pod.deleting]
        return [pod for pod in pods if group is None or pod.group == group]

    def _apply(self, manifest: Manifest) -> None:
        self.children[names.child_key(manifest)] = names.applied_hash(manifest["metadata"])
        if manifest["kind"] == names.JOB:
            job = manifest["metadata"]["name"]
            self.downloads[job] = ObservedDownload(job, DownloadPhase.PENDING)

    def _create(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        identity = names.pod_identity(manifest["metadata"])
        assert identity is not None
        if name in self.pods:
            return
        env = {entry["name"]: entry.get("value") for entry in manifest["spec"]["containers"][0]["env"]}
        self._wishes[name] = Lifecycle(env["MEGATRON_LIFECYCLE"])
        if env["MEGATRON_LEADER"] == "1":
            self._born_leaders[name] = int(env["MEGATRON_LEADER_EPOCH"])
        self.pods[name] = ObservedPod(
            name=name,
            uid=f"uid-of-{name}-{self.now}",
            group=identity.group,
            attempt=identity.attempt,
            index=identity.index,
            leader=identity.leader,
            epoch=identity.epoch,
            template_hash=identity.template_hash,
            restarts=identity.restarts,
            default_image=manifest["metadata"]["annotations"].get(names.DEFAULT_IMAGE_ANNOTATION),
            cached_source=manifest["metadata"]["annotations"].get(names.CACHED_SOURCE_ANNOTATION),
            phase=PodPhase.PENDING,
            ready=False,
            created_at=self.now,
            startup_since=self.now if self.has_room else None,
            waiting=None if self.has_room else Failure("Unschedulable", "0/3 nodes have a GPU"),
            address=f"10.{identity.index}.{identity.group}.{identity.attempt}",
        )

    def selected(self) -> list[ObservedPod]:
        """Pods that the coordinator's Service selects."""
        return [pod for pod in self.pods.values() if pod.leader and not pod.finished]

    def coordinators(self) -> list[ObservedPod]:
        """Pods with a coordinator."""
        return [pod for pod in self.pods.values() if pod.reports_leader]

    def _as_seen(self, pod: ObservedPod) -> ObservedPod:
        """An unreachable pod reports no state."""
        since = self._silent_since(pod)
        if since is not None:
            return replace(pod, reports_leader=None, known_epoch=0, rank_phase=None, unreachable_since=since)
        return replace(pod, registered=pod.rank_phase == "Serving" and pod.index == 0 and self._is_coordinated())

    def _silent_since(self, pod: ObservedPod) -> float | None:
        if pod.phase is not PodPhase.RUNNING:
            return pod.created_at
        return self.still.get(pod.name, self._cut_off_since if pod.leader else None)

    def _is_coordinated(self) -> bool:
        return any(pod.name not in self.still for pod in self.coordinators())

    def _tell(self, address: str, leads: bool, epoch: int, lifecycle: Lifecycle) -> None:
        """A pod ignores decisions with a lower epoch than the last."""
        pod = next(
            (pod for pod in self.pods.values() if pod.address == address and pod.phase is PodPhase.RUNNING), None
        )
        if pod is None or pod.name in self.still or epoch < pod.known_epoch or (leads and pod.deleting):
            return
        if leads and not pod.reports_leader:
            if epoch == pod.known_epoch:
                return
            self._wishes[pod.name] = lifecycle
            self.engine_state = SETTLED_STATE[lifecycle]
            self.auto_suspended = False
        self.change(pod.name, reports_leader=leads, known_epoch=epoch)
        self._notice_loss()

    def _notice_loss(self) -> None:
        if not self.coordinators():
            self.engine_state = None
            self.auto_suspended = False

    def _engine(self) -> ObservedEngine | None:
        leader = current_leader(pod for pod in self.pods.values() if not pod.deleting)
        if leader is None or leader.phase is not PodPhase.RUNNING:
            return None
        if not self.reachable or leader.name in self.still or not leader.ready:
            # An adapter may return the last known state.
            return ObservedEngine(reachable=False, state=self.engine_state, message="connection refused")
        if not leader.reports_leader:
            return ObservedEngine(reachable=True)
        serving = [pod for pod in self.live() if pod.rank_phase == "Serving" and pod.index == 0]
        assert self.engine_state is not None
        replicas = tuple(ObservedReplica(pod.group, self.engine_state) for pod in serving)
        return ObservedEngine(
            reachable=True, state=self.engine_state, auto_suspended=self.auto_suspended, replicas=replicas
        )

    def _take(self, signal: Signal) -> None:
        was_asleep, self.auto_suspended = self.auto_suspended, False
        if was_asleep and signal is Signal.SUSPEND and self.engine_state is EngineState.SUSPENDED:
            return
        if self.engine_state not in ALLOWED_FROM[signal]:
            self.refused.append(signal)
            raise SignalRefused(f"{signal} is not allowed in {self.engine_state}")
        self.engine_state = IN_PROGRESS_REASONS[signal]

"""The ``ClusterAdapter`` of one resource on a cluster."""

from __future__ import annotations

import asyncio
import base64
import http
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from megatron_operator import kueue, names
from megatron_operator.api.v1alpha1 import Cache
from megatron_operator.control_client import ControlClient, PodReport
from megatron_operator.kubernetes.api_server import ApiServer, ServerError, ServerRefusal
from megatron_operator.kubernetes.disruptions import Disruptions
from megatron_operator.kubernetes.gang_kinds import GangKinds
from megatron_operator.kubernetes.image_volumes import ImageVolumes
from megatron_operator.kubernetes.kueue_workloads import delete_workload
from megatron_operator.kubernetes.missing_kinds import MissingKinds, Wake
from megatron_operator.kubernetes.model_caches import ModelCaches, observed_downloads
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.observation import Answer, ControlApiPoller, observed_state
from megatron_operator.observed_state import (
    Action,
    ActionRefused,
    AdapterError,
    AdoptPod,
    ApplyChild,
    CreatePod,
    CreateSecret,
    DeleteChild,
    DeletePod,
    Manifest,
    NamespaceTerminating,
    ObservedState,
    PodPhase,
    SendRole,
    SendSignal,
    SetRoleLabel,
)
from megatron_operator.render.merge import dropped_fields

Object = Mapping[str, Any]


class KubernetesAdapter:
    """Only children with the resource's ``uid`` as owner belong to it; those of other owners are never changed.

    Children without an owner are left from a deleted resource of the same name, and are adopted.
    """

    def __init__(
        self,
        api: ApiServer,
        uid: str,
        client: httpx.AsyncClient,
        kinds: MissingKinds,
        gang_kinds: GangKinds,
        disruptions: Disruptions,
        wake: Wake,
        *,
        model_caches: bool = True,
    ) -> None:
        """``client`` connects to pods. ``wake`` is called when a missing kind appears, or a pod answers late. Without
        ``model_caches`` the operator may not read Jobs and claims."""
        self._api = api
        self._kinds = kinds
        self._gang_kinds = gang_kinds
        self._disruptions = disruptions
        self._wake = wake
        self._uid = uid
        self._client = client
        self._token: str | None = None
        self._image_volumes = ImageVolumes(api)
        self._caches = ModelCaches(api, is_enabled=model_caches)
        self._poller = ControlApiPoller(wake)
        self.control_client = ControlClient(None, http=client)
        """Client of the pods' control APIs; replaced when the token is known."""
        self._applied: dict[str, Any] = {}
        """The fields of each child that the operator managed right after it applied them."""
        self._gangs: set[str] | None = None
        """Gang kinds that may have objects; None before the first observation."""
        self._routes = set(names.ROUTE_KINDS)
        """Route kinds that may exist: after the first observation, only those that were found or created."""
        self._checked: tuple[str, Mapping[str, Any]] | None = None
        """The template hash of the last dry run, and the fields that it dropped."""
        self.revisions: Mapping[str, int] = {}
        """Revision of the last report of each observed pod, by the pod's uid."""

    async def observe(self, name: str, namespace: str, cache: Cache | None = None) -> ObservedState:
        """Raises AdapterError when the API server does not answer. A pod that does not answer is observed without a
        report."""
        self._image_volumes.look_again()
        pods, found = await self._read(name, namespace)
        named = {names.child_key(each): each for each in found if each is not None}
        children = {key: each for key, each in named.items() if self._owns(each)}
        orphans = {key: each for key, each in named.items() if _is_orphan(each, name)}
        secret = named.get(names.keys_child(name))
        if secret is not None and self._has_secret(secret, name):
            children[names.keys_child(name)] = secret
            self._use_token(secret)
        ours = [pod for pod in pods if self._owns(pod)]
        downloads = await self._caches.pods(name, namespace)
        await self._poller.keep_only({pod["metadata"]["uid"] for pod in [*ours, *downloads]})
        answers = await asyncio.gather(*(self._ask(pod) for pod in ours))
        self.revisions = {
            pod["metadata"]["uid"]: answer.revision
            for pod, answer in zip(ours, answers, strict=True)
            if isinstance(answer, PodReport)
        }
        hashes = {
            key: names.applied_hash(child["metadata"]) if self._is_as_applied(child) else ""
            for key, child in children.items()
        }
        return observed_state(
            zip(map(observed_pod, ours), answers, strict=True),
            hashes,
            taken=frozenset(named) - hashes.keys() - orphans.keys(),
            orphans=filter(None, map(observed_pod, _orphaned(pods, name))),
            gang_kinds=await self._gang_kinds.served(),
            budget_kind=await self._disruptions.budget_kind(),
            cordoned_nodes=await self._disruptions.cordoned_nodes(),
            downloads=observed_downloads(
                (each for each in children.values() if each["kind"] == names.JOB),
                downloads,
                await asyncio.gather(*(self._ask(pod) for pod in downloads)),
            ),
            cache_nodes=await self._caches.nodes(cache),
        )

    async def dropped_fields(self, pod: Manifest, override: Manifest) -> Mapping[str, Any]:
        """Found by a dry run, once for each template."""
        template = pod["metadata"]["labels"][names.TEMPLATE_HASH_LABEL]
        if self._checked is None or self._checked[0] != template:
            try:
                stored = await self._api.create(pod, dry_run=True)
                dropped = dropped_fields(override, stored["spec"], "spec.podTemplate.spec")
            except NamespaceTerminating:
                return {}
            except ServerRefusal as refusal:
                if refusal.status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY):
                    raise
                return {}  # Quota or admission: the creation of the pod reports it.
            self._checked = (template, dropped)
        return self._checked[1]

    async def has_keys(self, name: str, namespace: str) -> bool:
        """Whether the Secret with the keys exists. Raises AdapterError when the API server does not answer."""
        secret = await self._api.get("Secret", namespace, names.keys_secret(name))
        return secret is not None and self._has_secret(secret, name)

    async def close(self) -> None:
        """Cancel open polls."""
        await self._poller.close()

    async def _read(self, name: str, namespace: str) -> tuple[Sequence[Object], Sequence[Object | None]]:
        """The pods, and all other objects that have a name of a child, those of other owners too."""
        labels = names.selector_labels(name)
        pods, services, (secret, policy, budget), routes, gangs, cached = await asyncio.gather(
            self._api.list("Pod", namespace, labels),
            self._api.list("Service", namespace, labels),
            asyncio.gather(
                self._api.get("Secret", namespace, names.keys_secret(name)),
                self._api.get("NetworkPolicy", namespace, names.network_policy(name)),
                self._disruptions.budget(name, namespace),
            ),
            self._find_routes(name, namespace),
            self._find_gangs(name, namespace),
            self._caches.objects(name, namespace),
        )
        if secret is None and pods:
            # A pod's Secret exists before the pod, so the first read preceded both; this one finds the Secret.
            secret = await self._api.get("Secret", namespace, names.keys_secret(name))
        # Items of a list have no kind.
        found = [*({**each, "kind": "Service"} for each in services), secret, policy, budget, *routes, *gangs, *cached]
        # Services of other owners have other labels. Those of a resource whose Services exist are not read again.
        absent = set(names.services(name)) - {each["metadata"]["name"] for each in services}
        found += await asyncio.gather(*(self._api.get("Service", namespace, each) for each in sorted(absent)))
        return pods, found

    async def _find_routes(self, name: str, namespace: str) -> list[Object]:
        """Most resources have no route, so each round reads only the kinds that may exist."""
        kinds = sorted(kind for kind in self._routes if not self._kinds.is_missing(kind))
        found = await asyncio.gather(*(self._api.get(kind, namespace, names.route(name)) for kind in kinds))
        routes: list[Object] = [route for route in found if route is not None]
        self._routes = {route["kind"] for route in routes}
        for kind in self._routes:
            # Repeated in every round: a late discovery of kopf may have dropped the kind again.
            await self._kinds.found(kind)
        return routes

    async def _find_gangs(self, name: str, namespace: str) -> list[Object]:
        """Most resources have no gang object, so each round reads only the kinds that may have some."""
        kinds = await self._gang_kinds.served() if self._gangs is None else self._gangs
        found = await self._gang_kinds.objects(name, namespace, kinds)
        self._gangs = {names.kind_of(each) for each in found}
        return found

    async def apply(self, name: str, namespace: str, action: Action) -> None:  # noqa: ARG002  # the protocol's signature
        """Raises ActionRefused if the API server refuses, SignalRefused if the engine does, AdapterError otherwise."""
        match action:
            case ApplyChild(manifest):
                await self._apply_child(manifest)
            case DeleteChild(kueue.WORKLOAD, workload):
                await delete_workload(self._api, namespace, workload)
            case DeleteChild(kind, child):
                await self._delete_child(kind, namespace, child)
            case CreateSecret(manifest, random_keys):
                await self._create(_with_random_values(manifest, random_keys))
            case CreatePod(manifest):
                await self._image_volumes.check(manifest)
                await self._create(manifest)
            case AdoptPod(pod, uid, owner):
                await self._api.patch_metadata("Pod", namespace, pod, uid=uid, changes={"ownerReferences": [owner]})
            case DeletePod(pod, uid, grace_seconds):
                await self._api.delete("Pod", namespace, pod, uid=uid, grace_seconds=grace_seconds)
            case SendSignal(signal, address):
                self._api.check_may_act()
                await self.control_client.signal(address, signal)
            case SetRoleLabel(pod, uid, leader, epoch):
                await self._api.patch_metadata(
                    "Pod", namespace, pod, uid=uid, changes=names.role_metadata(leader, epoch)
                )
            case SendRole(address, leader, epoch, lifecycle):
                self._api.check_may_act()
                await self.control_client.set_role(address, leader=leader, epoch=epoch, lifecycle=lifecycle)

    def _owns(self, obj: Object) -> bool:
        metadata = obj["metadata"]
        owners = [owner.get("uid") for owner in metadata.get("ownerReferences") or []]
        return self._uid in [*owners, (metadata.get("annotations") or {}).get(names.OWNER_ANNOTATION)]

    def _has_secret(self, secret: Object, name: str) -> bool:
        """Whether the Secret is the resource's. The operator may not change Secrets, so an orphan stays one."""
        return self._owns(secret) or _is_orphan(secret, name)

    def _is_as_applied(self, child: Object) -> bool:
        """False for a child that others changed or an earlier operator applied; it is applied again.

        A field that another manager changed is no longer managed by the operator.
        """
        if child["kind"] in ("Secret", names.JOB):
            return True
        return bool(self._applied.get(names.child_key(child)) == _our_fields(child))

    def _use_token(self, secret: Object) -> None:
        encoded = (secret.get("data") or {}).get(names.CONTROL_TOKEN)
        token = base64.b64decode(encoded).decode() if encoded else None
        if token != self._token:
            self._token, self.control_client = token, ControlClient(token, http=self._client)

    async def _ask(self, pod: Object) -> Answer:
        status = pod.get("status") or {}
        address = status.get("podIP")
        if status.get("phase") != PodPhase.RUNNING or not address:
            return None
        return await self._poller.poll(self.control_client, pod["metadata"]["uid"], address)

    async def _apply_child(self, manifest: Manifest) -> None:
        kind = names.kind_of(manifest)
        self._kinds.check(kind, self._wake)
        await self._check_free(manifest)
        self._routes |= {kind}.intersection(names.ROUTE_KINDS)
        if kind in names.GANG_KINDS:
            self._gangs = {*(self._gangs or ()), kind}
        self._caches.will_create(kind)
        if kind == names.JOB:
            await self._create_job(manifest)
            return
        try:
            applied = await self._api.apply(manifest)
        except ServerError as error:
            await self._kinds.explain(kind, error, self._wake)
            raise
        self._applied[names.child_key(manifest)] = _our_fields(applied)
        await self._kinds.found(kind)

    async def _delete_child(self, kind: str, namespace: str, name: str) -> None:
        found = await self._api.get(kind, namespace, name)
        if found is not None and self._owns(found):
            await self._api.delete(kind, namespace, name, uid=found["metadata"]["uid"], grace_seconds=0)

    async def _create(self, manifest: Manifest) -> None:
        """Create the object. An existing one of this resource is success."""
        try:
            await self._api.create(manifest)
        except ServerRefusal as refusal:
            if not refusal.conflict:
                raise
            await self._check_free(manifest)

    async def _create_job(self, manifest: Manifest) -> None:
        """Create the Job. One of a deleted resource of the same name is replaced; its download is not repeated."""
        metadata = manifest["metadata"]
        found = await self._api.get(names.JOB, metadata["namespace"], metadata["name"])
        if found is not None and _is_orphan(found, metadata["labels"][names.NAME_LABEL]):
            uid = found["metadata"]["uid"]
            await self._api.delete(names.JOB, metadata["namespace"], metadata["name"], uid=uid, grace_seconds=0)
        await self._create(manifest)

    async def _check_free(self, manifest: Manifest) -> None:
        """Raises AdapterError when an object of another owner has the name."""
        kind, metadata = names.kind_of(manifest), manifest["metadata"]
        found = await self._api.get(kind, metadata["namespace"], metadata["name"])
        if found is None or self._owns(found):
            return
        if kind != "Pod" and _is_orphan(found, metadata["labels"][names.NAME_LABEL]):
            return
        which = f"{kind} {metadata['name']}"
        if (found["metadata"].get("labels") or {}).get(names.NAME_LABEL) == metadata["labels"][names.NAME_LABEL]:
            raise AdapterError(f"{which} of a deleted resource of the same name still exists: waiting for its deletion")
        raise ActionRefused(f"{which} exists and has another owner: delete it, or give the resource another name")


def _is_orphan(obj: Object, name: str) -> bool:
    """Whether the object was a child of a resource of this name, and has no owner any more."""
    metadata = obj["metadata"]
    labels = metadata.get("labels") or {}
    return not metadata.get("ownerReferences") and names.selector_labels(name).items() <= labels.items()


def _orphaned(pods: Sequence[Object], name: str) -> Iterator[Object]:
    """Pods to adopt: those that are being deleted just disappear."""
    return (pod for pod in pods if _is_orphan(pod, name) and not pod["metadata"].get("deletionTimestamp"))


def _with_random_values(manifest: Manifest, keys: Sequence[str]) -> Manifest:
    return {**manifest, "stringData": {key: secrets.token_urlsafe(32) for key in keys}}


def _our_fields(child: Object) -> Any:
    """The fields that server-side apply records for the operator; never equal to a missing entry."""
    entries: Sequence[Object] = child["metadata"].get("managedFields") or []
    applied = (each for each in entries if each.get("manager") == names.MANAGER and each.get("operation") == "Apply")
    return next((each.get("fieldsV1") for each in applied), {})

"""Client of the API server: JSON requests with timeouts and typed errors."""

from __future__ import annotations

import asyncio
import http
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import yaml
from kubernetes.aio import client, config

from megatron_operator import kueue, names
from megatron_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from megatron_operator.observed_state import ActionRefused, AdapterError, NamespaceTerminating

KUBECONFIG_ERRORS = (config.ConfigException, yaml.YAMLError, OSError, AttributeError, TypeError)
"""Errors of the client for a kubeconfig that it can't use."""
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=20.0, connect=5.0)
MAX_DELAYS = 5
"""Attempts for a request that the API server delays (429) before it counts as failed."""
LONGEST_DELAY = 60.0
PAGE = 200
"""Objects in one answer to a list request."""
CORDONED = "spec.unschedulable=true"
"""Field selector of cordoned nodes."""
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

PATHS = {
    "Event": ("/apis/events.k8s.io/v1", "events"),
    "HTTPRoute": ("/apis/gateway.networking.k8s.io/v1", "httproutes"),
    "InferencePool": ("/apis/inference.networking.k8s.io/v1", "inferencepools"),
    "Ingress": ("/apis/networking.k8s.io/v1", "ingresses"),
    names.CLAIM: ("/api/v1", "persistentvolumeclaims"),
    names.JOB: ("/apis/batch/v1", "jobs"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "MegatronInference": (f"/apis/{GROUP}/{VERSION}", PLURAL),
    names.BUDGET: ("/apis/policy/v1", "poddisruptionbudgets"),
    names.BUDGET_V1BETA1: ("/apis/policy/v1beta1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Node": ("/api/v1", "nodes"),
    "Pod": ("/api/v1", "pods"),
    names.POD_GROUP: ("/apis/scheduling.k8s.io/v1alpha2", "podgroups"),
    names.SCHEDULER_PLUGINS_POD_GROUP: ("/apis/scheduling.x-k8s.io/v1alpha1", "podgroups"),
    names.VOLCANO_POD_GROUP: ("/apis/scheduling.volcano.sh/v1beta1", "podgroups"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    names.WORKLOAD: ("/apis/scheduling.k8s.io/v1alpha1", "workloads"),
    **{kind: (f"/apis/{version}", "workloads") for kind, version in kueue.WORKLOADS.items()},
}
"""The kinds that the operator uses, with their API paths."""

REFUSALS = (400, 403, 405, 409, 413, 415, 422)
"""Statuses for which a retry of the same request is of no use."""
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""Cause of the API server's refusal to create objects in a namespace that is being deleted."""

Json = dict[str, Any]


class ServerError(AdapterError):
    """A request failed and may succeed later. ``status`` is None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerRefusal(ActionRefused):
    """The API server refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def conflict(self) -> bool:
        """Whether an object of that name exists, or has changed."""
        return self.status == http.HTTPStatus.CONFLICT


class ApiServer:
    """A connection to one cluster. Methods raise ServerRefusal, NamespaceTerminating and ServerError."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.check_may_act: Callable[[], None] = lambda: None
        """Called before each change. Raises AdapterError unless this operator holds the Lease."""

    @classmethod
    async def connect(cls) -> Self:
        """Connect to the cluster of this pod, or of KUBECONFIG. Raises ServerError when there is neither."""
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            paths = kubeconfig_paths()
            if not any_exists(paths):
                raise ServerError(f"no cluster: this is not a pod, and kubeconfig {paths} does not exist") from None
            try:
                await config.load_kube_config(paths, client_configuration=configuration, persist_config=False)
            except KUBECONFIG_ERRORS as error:
                raise ServerError(f"kubeconfig {paths}: {' '.join(str(error).split())}") from error
        api = client.ApiClient(configuration)
        api.user_agent = names.MANAGER
        return cls(api)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """None when the object does not exist."""
        try:
            return await self._request("GET", path_of(kind, namespace, name))
        except ServerError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return None
            raise

    async def knows(self, kind: str) -> bool:
        """Whether the API server serves the kind in the version that the operator uses."""
        root, plural = PATHS[kind]
        try:
            answer = await self._request("GET", root)
        except ServerError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            raise
        return any(each["name"] == plural for each in answer.get("resources") or [])

    async def select(self, kind: str, namespace: str, selector: str) -> list[Json]:
        """The objects that a label selector selects, read in pages so that no page takes long to parse."""
        query = {"labelSelector": selector, "limit": str(PAGE)}
        return [item async for item in self._pages(path_of(kind, namespace), query)]

    async def list(self, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Json]:
        """The objects with all of these labels."""
        return await self.select(kind, namespace, ",".join(f"{label}={value}" for label, value in labels.items()))

    async def cordoned_nodes(self) -> tuple[Json, ...]:
        """The nodes that are cordoned."""
        query = {"fieldSelector": CORDONED, "limit": str(PAGE)}
        return tuple([item async for item in self._pages(path_of("Node", ""), query)])

    async def _pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Json]:
        while True:
            answer = await self._request("GET", path, query)
            for item in answer.get("items") or []:
                yield item
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return
            query = {**query, "continue": token}

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Json:
        """The object as stored, or as a dry run would store it. Raises ServerRefusal with ``conflict`` when the name is
        taken."""
        path = path_of(names.kind_of(manifest), manifest["metadata"]["namespace"])
        query = {"fieldManager": names.MANAGER, **({"dryRun": "All"} if dry_run else {})}
        return await self._request("POST", path, query, body=manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> Json:
        """Raises ServerRefusal with ``conflict`` when the object has changed since the version in the manifest."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, {"fieldManager": names.MANAGER}, body=manifest)

    async def apply(self, manifest: Mapping[str, Any]) -> Json:
        """Server-side apply of the fields of the manifest; fields of other managers stay as they are."""
        metadata = manifest["metadata"]
        path = path_of(names.kind_of(manifest), metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.MANAGER, "force": "true"}
        return await self._request("PATCH", path, query, body=manifest, content_type=APPLY_PATCH)

    async def patch_status(self, obj: Mapping[str, Any], patch: Mapping[str, Any]) -> Json | None:
        """JSON merge patch of the status of this object: null removes a field, lists are replaced.

        None when the object is gone or replaced.
        """
        metadata = obj["metadata"]
        path = path_of(obj["kind"], metadata["namespace"], metadata["name"]) + "/status"
        body = {"metadata": {"uid": metadata["uid"]}, "status": patch}
        query = {"fieldManager": names.MANAGER}
        try:
            return await self._request("PATCH", path, query, body=body, content_type=MERGE_PATCH)
        except (ServerError, ServerRefusal) as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return None
            # A replaced object is a conflict, but so is a concurrent write.
            if error.status == http.HTTPStatus.CONFLICT and not await self._is_there(obj):
                return None
            raise

    async def patch_metadata(
        self, kind: str, namespace: str, name: str, *, uid: str, changes: Mapping[str, Any]
    ) -> None:
        """Set labels, annotations or owner references of this object. One that is gone or replaced is success."""
        body = {"metadata": {"uid": uid, **changes}}
        path, query = path_of(kind, namespace, name), {"fieldManager": names.MANAGER}
        try:
            await self._request("PATCH", path, query, body=body, content_type=MERGE_PATCH)
        except (ServerError, ServerRefusal) as error:
            if error.status not in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.CONFLICT):
                raise

    async def _is_there(self, obj: Mapping[str, Any]) -> bool:
        """Whether this object still exists."""
        metadata = obj["metadata"]
        found = await self.get(obj["kind"], metadata["namespace"], metadata["name"])
        return found is not None and found["metadata"]["uid"] == metadata["uid"]

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str | None, grace_seconds: int) -> None:
        """Delete this object, or without a ``uid`` any of this name. One that is gone or replaced is success."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {} if uid is None else {"uid": uid},
            "propagationPolicy": "Background",
            "gracePeriodSeconds": grace_seconds,
        }
        try:
            await self._request("DELETE", path_of(kind, namespace, name), body=options)
        except ServerRefusal as refusal:
            if not refusal.conflict:
                raise
        except ServerError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        for _ in range(MAX_DELAYS):
            if method != "GET" and not path.startswith(PATHS["Lease"][0]):
                self.check_may_act()
            status, delay, text = await self._send(method, path, query, headers, body)
            if delay is None:
                break
            await asyncio.sleep(delay)
        return answer_of(f"{method} {path}", status, text)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None,
    ) -> tuple[int, float | None, str]:
        """Status, requested delay and text of the answer."""
        try:
            response = await self._call(method, path, query, headers, body, REQUEST_TIMEOUT)
            text = (await response.read()).decode()
            return response.status, delay_of(response.status, response.headers.get("Retry-After")), text
        except TimeoutError as error:
            raise ServerError(f"{method} {path}: no answer within {REQUEST_TIMEOUT.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{method} {path}: the API server cannot be reached: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        """The client's answer, with its body unread. Raises the errors of aiohttp."""
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=dict(headers),
            body=None if body is None else dict(body),
            auth_settings=["BearerToken"],
        )
        return await self._api.call_api(*request, _request_timeout=timeout)


def delay_of(status: int, retry_after: str | None) -> float | None:
    """Seconds after which a busy API server accepts the request again; None when it has answered."""
    if status != http.HTTPStatus.TOO_MANY_REQUESTS or retry_after is None or not retry_after.isdigit():
        return None
    return min(float(retry_after), LONGEST_DELAY)


def group_version_plural(kind: str) -> tuple[str, str, str]:
    """API group, version and plural of a kind; the core group is empty."""
    root, plural = PATHS[kind]
    _, _, *group, version = root.split("/")
    return "".join(group), version, plural


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """URL path of an object, or of all objects of the kind in the namespace; without one, of a cluster-scoped kind."""
    root, plural = PATHS[kind]
    path = f"{root}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{root}/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


def answer_of(request: str, status: int, text: str) -> Json:
    """The parsed answer. Raises ServerRefusal, NamespaceTerminating and ServerError with the API server's message."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if 200 <= status < 300 and isinstance(answer, dict):
        return answer
    words = answer.get("message") if isinstance(answer, dict) else None
    message = f"{request}: {words or text[:300] or 'an empty answer'} ({status})"
    if NAMESPACE_TERMINATING in _causes(answer):
        raise NamespaceTerminating(message)
    if status in REFUSALS:
        raise ServerRefusal(message, status)
    raise ServerError(message, status)


def _causes(answer: Any) -> list[str]:
    """The causes that a refusal lists."""
    details = answer.get("details") if isinstance(answer, dict) else None
    causes = details.get("causes") if isinstance(details, dict) else None
    return [str(each.get("reason")) for each in causes or [] if isinstance(each, dict)]


def kubeconfig_paths() -> str:
    """The files of KUBECONFIG, separated by colons, else ~/.kube/config."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def any_exists(paths: str) -> bool:
    """Whether there is at least one of the files, which colons separate."""
    return any(path and Path(path).expanduser().exists() for path in paths.split(os.pathsep))

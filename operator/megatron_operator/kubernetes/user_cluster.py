"""A user's access to a cluster: kubeconfig and context, streams, and errors for users."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client, config

from megatron_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from megatron_operator.kubernetes.api_server import (
    KUBECONFIG_ERRORS,
    MERGE_PATCH,
    ApiServer,
    Json,
    ServerError,
    answer_of,
    any_exists,
    kubeconfig_paths,
    path_of,
)
from megatron_operator.observed_state import AdapterError

USER_AGENT = "kubectl-megatron"
"""Also the field manager of users' changes."""
RESOURCES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
NAMESPACE_OF_THIS_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5.0)


class BrokenAnswer(ServerError):
    """The connection ended in the middle of an answer."""


class EndpointError(AdapterError):
    """An error of the OpenAI endpoint behind the API server's proxy."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UserCluster(ApiServer):
    """The cluster of a kubeconfig's context. Methods raise ServerRefusal and ServerError."""

    def __init__(self, api: client.ApiClient, *, context: str, namespace: str) -> None:
        super().__init__(api)
        self.context = context
        self.namespace = namespace
        """The namespace of the context, used by default."""
        self.server = str(api.configuration.host)

    @classmethod
    async def open(cls, kubeconfig: Path | None = None, context: str | None = None) -> Self:
        """Connect by ``kubeconfig``, else the files of KUBECONFIG, else ~/.kube/config, else the cluster of this pod.

        Raises ServerError when none of them works.
        """
        configuration = client.Configuration()
        paths = str(kubeconfig or kubeconfig_paths())
        if not any_exists(paths):
            return cls._around_this_pod(configuration, paths)
        try:
            loader = await config.load_kube_config(
                paths, context=context, client_configuration=configuration, persist_config=False
            )
        except KUBECONFIG_ERRORS as error:
            raise ServerError(f"kubeconfig {paths}: {' '.join(str(error).split())}") from error
        chosen = loader.current_context
        namespace = (chosen.get("context") or {}).get("namespace") or "default"
        return cls(_client(configuration), context=str(chosen.get("name")), namespace=namespace)

    @classmethod
    def _around_this_pod(cls, configuration: client.Configuration, paths: str) -> Self:
        try:
            config.load_incluster_config(client_configuration=configuration)
            namespace = NAMESPACE_OF_THIS_POD.read_text().strip()
        except (config.ConfigException, OSError) as error:
            words = f"no cluster: kubeconfig {paths} does not exist; set KUBECONFIG, or use --kubeconfig FILE"
            raise ServerError(words) from error
        return cls(_client(configuration), context="(this pod)", namespace=namespace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """GET any path."""
        return await self._request("GET", path, query)

    async def post(self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None) -> Json:
        """POST to any path."""
        return await self._request("POST", path, query, body=body)

    async def set_spec(self, namespace: str, name: str, spec: Mapping[str, Any]) -> Json:
        """Change these fields of a resource's spec; returns the changed resource."""
        path = path_of("MegatronInference", namespace, name)
        query = {"fieldManager": USER_AGENT}
        return await self._request("PATCH", path, query, body={"spec": dict(spec)}, content_type=MERGE_PATCH)

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Json]:
        """The events of one watch, until the API server ends it."""
        async with self.stream("GET", path, {**query, "watch": "true"}) as answer:
            async for line in answer.content:
                yield json.loads(line)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed answer, without a time limit. Raises EndpointError and BrokenAnswer too."""
        sent = {"Accept": "*/*", "Content-Type": "application/json", **(headers or {})}
        try:
            answer = (await self._call(method, path, query, sent, body, STREAM_TIMEOUT)).response
        except TimeoutError as error:
            raise ServerError(f"{method} {path}: no answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{method} {path}: the API server cannot be reached: {error}") from error
        try:
            if answer.status >= 300:
                raise _refusal(f"{method} {path}", answer.status, await answer.text())
            yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenAnswer(f"{method} {path}: the answer ended early: {error}") from error
        finally:
            answer.close()


def resources_path(namespace: str | None) -> str:
    """URL path of all resources of a namespace, or of all namespaces."""
    return RESOURCES if namespace is None else path_of("MegatronInference", namespace)


def core_path(namespace: str, plural: str, name: str = "") -> str:
    """URL path of objects of the core API in a namespace."""
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


def _refusal(request: str, status: int, text: str) -> AdapterError:
    """The error of the API server, or of the endpoint behind its proxy."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return EndpointError(str(json.loads(text)["error"]["message"]), status)
    try:
        answer_of(request, status, text)
    except AdapterError as error:
        return error
    raise AssertionError("this status is a refusal")


def _client(configuration: client.Configuration) -> client.ApiClient:
    api = client.ApiClient(configuration)
    api.user_agent = USER_AGENT
    return api

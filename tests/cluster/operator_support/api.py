"""Raw access to the API server, for simulated parts of a cluster."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

from kubernetes.aio import client, config

MERGE = "application/merge-patch+json"
Json = dict[str, Any]


class ApiFailure(Exception):
    """An error response of the API server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """An asynchronous context manager for raw requests as the administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    async def __aenter__(self) -> Self:
        self._client = await config.new_client_from_config(str(self._kubeconfig), persist_config=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def get(self, path: str) -> Json:
        return await self._request("GET", path)

    async def items(self, path: str) -> list[Json]:
        items: list[Json] = (await self.get(path))["items"]
        return items

    async def post(self, path: str, body: Mapping[str, Any]) -> Json:
        return await self._request("POST", path, body)

    async def put(self, path: str, body: Mapping[str, Any]) -> Json:
        return await self._request("PUT", path, body)

    async def merge(self, path: str, body: Mapping[str, Any]) -> Json:
        return await self._request("PATCH", path, body, MERGE)

    async def delete(self, path: str, **options: Any) -> None:
        """Deletes an object; succeeds if it does not exist."""
        try:
            await self._request("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **options})
        except ApiFailure as failure:
            if failure.status not in (404, 409):
                raise

    async def changes(self, path: str) -> AsyncIterator[None]:
        """A watch of the objects: at least one item for what exists, and one after each change. Ends with the watch."""
        api: client.ApiClient = self._client
        words = await api.param_serialize("GET", f"{path}?watch=true", auth_settings=["BearerToken"])
        response = (await api.call_api(*words, _request_timeout=3600)).response
        try:
            async for _ in response.content.iter_any():
                yield
        finally:
            response.close()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = "application/json"
    ) -> Json:
        api: client.ApiClient = self._client
        request = await api.param_serialize(
            method,
            path,
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=None if body is None else dict(body),
            auth_settings=["BearerToken"],
        )
        response = await api.call_api(*request, _request_timeout=20)
        answer: Json = json.loads(await response.read())
        if response.status >= 300:
            raise ApiFailure(response.status, str(answer.get("message")))
        return answer

"""One endpoint for many models: it lists them, and finds the model of a request by ``model`` in its body."""

from __future__ import annotations

import http

from aiohttp import web

from megatron_operator.activator.api_keys import KeySecrets
from megatron_operator.activator.catalog import Catalog
from megatron_operator.activator.models import Models
from megatron_operator.activator.proxy import HeldRequest
from megatron_operator.activator.refusal import Refusal
from megatron_operator.activator.served_models import model_missing

MODELS = "models"
READS = ("GET", "HEAD")


class ModelEndpoint:
    """The paths below ``/v1`` for the models of one namespace."""

    def __init__(self, catalog: Catalog, models: Models, keys: KeySecrets, namespace: str, body_timeout: float) -> None:
        self._catalog = catalog
        self._models = models
        self._keys = keys
        self._namespace = namespace
        self._body_timeout = body_timeout

    async def listing(self, request: web.Request, path: str) -> web.Response | None:
        """The answer for ``models`` and ``models/<name>``; None for other paths. Starts no model.

        Raises Refusal for an unknown model, AdapterError.
        """
        first, _, name = path.partition("/")
        if request.method not in READS or first != MODELS:
            return None
        if name:
            return web.json_response((await self._catalog.find(self._namespace, name)).description)
        models = (await self._catalog.models(self._namespace)).values()
        return web.json_response({"object": "list", "data": [each.description for each in models]})

    async def choose(self, held: HeldRequest) -> None:
        """Read the body, and set the model of the request. Raises Refusal and AdapterError."""
        if held.request.method != "POST":
            words = (
                f"{held.request.method} {held.request.path}: names no model in a body; use the URL of the model,"
                f" /{self._namespace}/<name of its MegatronInference>{held.path}"
            )
            raise Refusal(words, http.HTTPStatus.NOT_FOUND, code="not_found")
        # The body names the model, so a key of any of them suffices to read it.
        rules = [model.keys for model in (await self._catalog.models(self._namespace)).values()]
        held.body.longest = await self._keys.longest_body(rules, held.request.headers)
        await held.read(self._body_timeout)
        if (envelope := held.envelope) is None:
            words = "the body is not a JSON object by RFC 8259, which has no NaN and no Infinity"
            raise Refusal(words, http.HTTPStatus.BAD_REQUEST, code="invalid_json")
        if envelope.model is None:
            raise model_missing(await self._catalog.models(self._namespace))
        held.key = (await self._catalog.find(self._namespace, envelope.model)).key
        try:
            await self._models.is_running(held.key)
        except Refusal as refusal:
            if refusal.status != http.HTTPStatus.NOT_FOUND:
                raise
            # The resource was deleted after the list was read; another one may have the name.
            held.key = (await self._catalog.find(self._namespace, envelope.model, max_age=0.0)).key

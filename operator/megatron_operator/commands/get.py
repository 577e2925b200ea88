"""``get``: resources as kubectl shows them, now or as they change."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.console import Console

from megatron_operator.api.v1alpha1 import PLURAL
from megatron_operator.api.v1alpha1.resource import GROUP
from megatron_operator.commands.failure import CommandFailed, CommandRefused, existing, not_found
from megatron_operator.commands.table import Columns, say
from megatron_operator.commands.typed import Output
from megatron_operator.kubernetes.api_server import Json, ServerError, path_of
from megatron_operator.kubernetes.user_cluster import TABLE, UserCluster, resources_path

NONE_FOUND = "no MegatronInference in {where}"
GONE = 410
PATIENCE = 3600


@dataclass(frozen=True)
class Get:
    """What was asked for. No names are all resources; ``everywhere`` is all namespaces."""

    names: tuple[str, ...] = ()
    everywhere: bool = False
    output: Output = Output.TABLE
    watch: bool = False

    async def run(self, cluster: UserCluster, namespace: str, console: Console) -> None:
        """Raises CommandFailed, WorldError."""
        if self.everywhere and self.names:
            raise CommandRefused(f"-A shows all resources; leave it out, or leave out {', '.join(self.names)}")
        if self.watch and (len(self.names) > 1 or self.output in (Output.JSON, Output.YAML)):
            raise CommandRefused("--watch shows a table or names, of one resource or of all; leave the rest out")
        where = None if self.everywhere else namespace
        if self.output in (Output.JSON, Output.YAML):
            await self._dump(cluster, where, console)
        else:
            await self._list(cluster, where, console)

    async def _dump(self, cluster: UserCluster, where: str | None, console: Console) -> None:
        if self.names:
            assert where is not None
            items = [await existing(cluster, where, name) for name in self.names]
        else:
            items = (await cluster.read(resources_path(where))).get("items") or []
        single = len(self.names) == 1
        found = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
        as_yaml = self.output is Output.YAML
        say(console, yaml.safe_dump(found, sort_keys=False).rstrip() if as_yaml else json.dumps(found, indent=2))

    async def _list(self, cluster: UserCluster, where: str | None, console: Console) -> None:
        tables = [await _table_of(cluster, path, where) for path in self._paths(where)]
        printer = _Printer(console, self.output, tables[0]["columnDefinitions"], with_namespace=where is None)
        for table in tables:
            printer.show(table)
        if not printer.shown and not self.watch:
            place = "any namespace" if where is None else f"namespace {where}"
            say(Console(stderr=True), NONE_FOUND.format(where=place))
        if self.watch:
            async for event in self._changes(cluster, where, tables[0]["metadata"]["resourceVersion"]):
                printer.show(event["object"])

    def _paths(self, where: str | None) -> Sequence[str]:
        if not self.names:
            return [resources_path(where)]
        assert where is not None
        return [path_of("MegatronInference", where, name) for name in self.names]

    async def _changes(self, cluster: UserCluster, where: str | None, version: str) -> AsyncIterator[Json]:
        """Watches end now and then; the next one goes on from where the last one was."""
        query = {"fieldSelector": f"metadata.name={self.names[0]}"} if self.names else {}
        while True:
            asked = {**query, "resourceVersion": version, "timeoutSeconds": str(PATIENCE)}
            async for event in cluster.watch(resources_path(where), asked, accept=TABLE):
                if event["type"] == "ERROR":
                    if event["object"].get("code") != GONE:
                        raise CommandFailed(str(event["object"].get("message")))
                    version = (await cluster.read(resources_path(where)))["metadata"]["resourceVersion"]
                    break
                version = event["object"]["rows"][0]["object"]["metadata"]["resourceVersion"]
                yield event


class _Printer:
    """Rows of the API server's tables, in the form that was asked for."""

    def __init__(
        self, console: Console, output: Output, columns: Sequence[Mapping[str, Any]], *, with_namespace: bool
    ) -> None:
        wide = output is Output.WIDE
        self._console = console
        self._output = output
        self._with_namespace = with_namespace
        self._chosen = [place for place, column in enumerate(columns) if wide or column.get("priority", 0) == 0]
        names = [str(columns[place]["name"]) for place in self._chosen]
        self._columns = Columns(console, ["Namespace", *names] if with_namespace else names)
        self.shown = 0

    def show(self, table: Mapping[str, Any]) -> None:
        rows: Sequence[Mapping[str, Any]] = table.get("rows") or []
        self.shown += len(rows)
        if self._output is Output.NAME:
            for row in rows:
                say(self._console, f"{PLURAL}.{GROUP}/{row['object']['metadata']['name']}")
        elif rows:
            self._columns.show([self._cells(row) for row in rows])

    def _cells(self, row: Mapping[str, Any]) -> list[str]:
        cells = ["-" if row["cells"][place] in (None, "") else str(row["cells"][place]) for place in self._chosen]
        return [row["object"]["metadata"]["namespace"], *cells] if self._with_namespace else cells


async def _table_of(cluster: UserCluster, path: str, namespace: str | None) -> Json:
    try:
        return await cluster.read(path, accept=TABLE)
    except ServerError as error:
        if error.status != 404 or namespace is None or path == resources_path(namespace):
            raise
        raise CommandFailed(await not_found(cluster, namespace, path.rpartition("/")[2])) from error

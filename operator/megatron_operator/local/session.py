"""Serves a MegatronInference on this machine until it fails or is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_operator.api.parse import InvalidResource
from megatron_operator.api.v1alpha1 import ConditionType, MegatronInferenceStatus, Phase
from megatron_operator.local.adapter import LocalAdapter
from megatron_operator.local.pod_manifest import PathMap
from megatron_operator.local.process_pod import log_tail
from megatron_operator.local.resource_file import ResourceDocument, ResourceFile
from megatron_operator.local.session_lock import AlreadyServedError, session_lock
from megatron_operator.local.snapshot import Snapshot, View
from megatron_operator.local.token_rate import TokenRate
from megatron_operator.observed_state import BAD_INPUT_EXIT_CODE, ActionRefused, ObservedState
from megatron_operator.reconcile import reconcile, validated
from megatron_operator.settings import Settings
from megatron_operator.status import as_json
from megatron_operator.wait_reasons import CACHE_FAILED

SERVED, FAILED, INVALID = 0, 1, 2
"""Exit codes."""
TICK_SECONDS = 0.5
"""Seconds between checks of the file and the pods without an event."""
ENDING_TICK_SECONDS = 0.2

NO_ACTIVATOR = (
    "spec.autoSuspend.stopAfter: has no effect on this machine, where no activator would start the processes again; the"
    " engine is suspended after idleAfter"
)


class SessionEnded(Exception):
    """The awaited state cannot be reached any more; ``str()`` says how the session ended."""


class LocalSession:
    """``run`` serves the file's resource; ``stop`` ends it and may be called by a signal handler."""

    def __init__(self, path: Path, *, paths: PathMap, view: View) -> None:
        self._file = ResourceFile(path)
        self._paths = paths
        self._view = view
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-local-"))
        self._wake = asyncio.Event()
        self._observed = LocalAdapter(self._folder, paths=paths, on_change=self._wake.set)
        self._stopping = asyncio.Event()
        self._stepped = asyncio.Condition()
        self._settings = replace(Settings.from_environment(), has_spare_nodes=False, has_activator=False)
        self._uid = str(uuid.uuid4())
        self._generation = 0
        self._status = MegatronInferenceStatus()
        self._problems: tuple[str, ...] = ()
        self._has_served = False
        self._began = time.monotonic()
        self._rate = TokenRate()
        self._tokens_per_second = 0.0
        self._ended = False
        self._last_words = ""
        self._document: ResourceDocument
        self.snapshot: Snapshot | None = None
        """The last snapshot."""

    async def run(self) -> int:
        """Returns an exit code when all processes are gone."""
        code = FAILED
        try:
            with session_lock(self._file.path):
                self._document = self._accepted(self._file.read())
                code = await self._serve()
        except AlreadyServedError as error:
            self._view.say(f"refused: {error}")
            code = INVALID
        except InvalidResource as error:
            for mistake in error.errors:
                self._view.say(f"refused: {mistake}")
            code = INVALID
        finally:
            await self._end_pods()
            await self._finish(code)
        return code

    def stop(self) -> None:
        """Stop gracefully; the second call kills all processes."""
        if self._stopping.is_set():
            self._observed.pods.kill()
        self._stopping.set()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stopping.is_set()

    async def stop_asked(self) -> None:
        """Returns when a stop was requested."""
        await self._stopping.wait()

    async def until(self, condition: Callable[[Snapshot], bool], what: str, seconds: float) -> Snapshot:
        """Wait for a snapshot. Raises SessionEnded, or TimeoutError naming ``what``."""

        def over() -> bool:
            return self._ended or (self.snapshot is not None and condition(self.snapshot))

        async with self._stepped:
            try:
                await asyncio.wait_for(self._stepped.wait_for(over), seconds)
            except TimeoutError:
                raise TimeoutError(f"{what} did not happen within {seconds:g} s") from None
        if self.snapshot is None or not condition(self.snapshot):
            raise SessionEnded(f"the session ended while waiting for: {what}")
        return self.snapshot

    async def _serve(self) -> int:
        while not self._stopping.is_set():
            self._wake.clear()
            self._take_edit()
            await self._or_stop(self._step())
            code = self._exit_code()
            if code is not None:
                return code
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
        return SERVED

    async def _step(self) -> None:
        result = await reconcile(self._object(), self._observed, settings=self._settings)
        self._status = result.status
        failed = self._status.condition(ConditionType.FAILED)
        for event in result.events:
            if failed is None or event.message != failed.message:  # the last message repeats it
                self._view.say(f"{event.reason}: {event.message}")
        if self._status.phase is Phase.RUNNING and not self._has_served:
            self._has_served = True
            self._view.say(self._curl_line())
        await self._show(result.observed or self._observe_without_polling())

    def _observe_without_polling(self) -> ObservedState:
        return self._observed.observe_without_polling(self._document.resource.name, self._document.resource.namespace)

    def _object(self) -> dict[str, Any]:
        """The resource with the fields that an API server adds."""
        obj = self._document.obj
        metadata = {**obj["metadata"], "uid": self._uid, "generation": self._generation}
        return {**obj, "metadata": metadata, "status": as_json(self._status)}

    async def _show(self, observed: ObservedState, *, ending: bool = False) -> None:
        if observed.engine is not None and observed.engine.reachable:
            self._tokens_per_second = self._rate.add(time.monotonic(), observed.engine.generated_tokens)
        self.snapshot = Snapshot(
            self._document.resource,
            self._status,
            observed,
            self._problems,
            ending,
            elapsed=time.monotonic() - self._began,
            tokens_per_second=self._tokens_per_second,
        )
        self._view.show(self.snapshot)
        async with self._stepped:
            self._stepped.notify_all()

    async def _or_stop(self, work: Awaitable[None]) -> None:
        """Await the work, or cancel it when the session is to stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def _take_edit(self) -> None:
        if not self._file.has_changed():
            return
        try:
            self._document = self._accepted(self._file.read())
        except InvalidResource as error:
            self._problems = tuple(f"{mistake} (the previous version keeps running)" for mistake in error.errors)
            return
        self._problems = ()

    def _accepted(self, document: ResourceDocument) -> ResourceDocument:
        """Raises InvalidResource for what an API server would reject, or what this machine does not have."""
        resource = document.resource
        if self._generation:
            before = self._document.resource.metadata
            for field in ("name", "namespace"):
                old, new = getattr(before, field), getattr(resource.metadata, field)
                if old != new:
                    fix = f"cannot change while it runs; write {old} again, or stop this session first"
                    raise InvalidResource.of(f"metadata.{field}", new, fix)
        validated(document.obj, self._settings)
        source = resource.spec.model.source.path
        if source is not None and not Path(self._paths.apply(source)).exists():
            raise InvalidResource.of("spec.model.source.path", source, self._no_such_path(source))
        self._observed.add_secrets(document.secrets)
        self._observed.local_ranks = resource.spec.replicas * resource.spec.parallelism.ranks
        if not self._generation or document.obj["spec"] != self._document.obj["spec"]:
            self._generation += 1
            if resource.spec.auto_suspend.stop_after > 0:
                self._view.say(NO_ACTIVATOR)
        return document

    def _no_such_path(self, source: str) -> str:
        here = self._paths.apply(source)
        if here == source:
            return "no such file or folder on this machine; correct it, or map it with --map-path"
        return f"no such file or folder: --map-path maps it to {here}; correct one of them"

    def _exit_code(self) -> int | None:
        """An exit code when the session cannot continue. The next edit may fix an error of the previous edit."""
        obstacle = self._observed.obstacle
        if obstacle is not None and not self._has_served:
            self._view.say(f"refused: {obstacle}")
            return INVALID if isinstance(obstacle, ActionRefused) else FAILED
        cached = self._status.condition(ConditionType.CACHED)
        if cached is not None and cached.reason == CACHE_FAILED and not self._has_served:
            self._last_words = f"failed: {cached.reason}: {cached.message}"
            return FAILED
        failed = self._status.condition(ConditionType.FAILED)
        if failed is None or failed.status != "True":
            return None
        bad_input = any(
            group.last_failure is not None and group.last_failure.exit_code == BAD_INPUT_EXIT_CODE
            for group in self._status.replica_groups
        )
        if bad_input and self._has_served:
            return None
        self._last_words = f"failed: {failed.reason}: {failed.message}"
        if not bad_input:
            self._tell_logs()
        return INVALID if bad_input else FAILED

    def _tell_logs(self) -> None:
        for pod in self._observed.pods.statuses():
            if pod.finished:
                self._view.say(f"the end of {pod.log}:\n{log_tail(pod.log)}")

    def _curl_line(self) -> str:
        name = self._status.model_name or self._document.resource.name
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
        return f"try: curl {self._status.url}/chat/completions -H 'Content-Type: application/json' -d '{body}'"

    async def _end_pods(self) -> None:
        if self._observed.pods.statuses():
            self._view.say("ending the pods: each drains first; Ctrl-C again kills them at once")
        closing = asyncio.create_task(self._observed.close())
        await asyncio.sleep(0)  # so that the first snapshot shows them ending
        while self.snapshot is not None and not closing.done():
            await self._show(self._observe_without_polling(), ending=True)
            await asyncio.wait({closing}, timeout=ENDING_TICK_SECONDS)
        await closing
        if self.snapshot is not None:
            await self._show(ObservedState(now=time.time()), ending=True)
            self._view.say("all pods have ended")

    async def _finish(self, code: int) -> None:
        self._ended = True
        async with self._stepped:
            self._stepped.notify_all()
        if self._last_words:
            self._view.say(self._last_words)
        if code == FAILED:
            self._view.say(f"logs: {self._folder}")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

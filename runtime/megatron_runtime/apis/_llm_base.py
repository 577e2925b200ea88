"""The base class of MegatronLLM and MegatronAsyncLLM: construction, properties and the background event loop."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_runtime.apis.coordinated_runtime import CoordinatedRuntime
from megatron_runtime.apis.direct_runtime import DirectRuntime
from megatron_runtime.apis.runtime_thread import RuntimeThread
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.megatron import from_megatron
from megatron_runtime.parallel.world import World

_Result = TypeVar("_Result")


class _MegatronLLMBase:
    """An engine for one model, used directly or through a coordinator.

    With several ranks, as torchrun starts them, every rank constructs an LLM with its part of the model, or with a
    whole one. In coordinator mode every rank calls the lifecycle methods, and only rank 0 generates, with all replica
    groups. In direct mode every rank generates, and all ranks of a replica group get the same prompts.

    Args:
        model: From `model.checkpoint.load_model`, with the ranks of `join_world` if several ranks share it; or a live
            GPTModel of Megatron Core, which is served in place, as by `from_megatron`.
        tokenizer: From `model.checkpoint.load_tokenizer`; or, with a GPTModel, one of Megatron or transformers.
        inference_config: None means the defaults.
        use_coordinator: Run the engine in a background thread, behind a coordinator process.
        coordinator_host: Address that the coordinator listens on; needs use_coordinator.
        coordinator_port: Port that the coordinator listens on; needs use_coordinator.

    Raises:
        ConfigurationError: The options are inconsistent, the configuration doesn't fit the model, or the model doesn't
            fit this rank of the world.
        CoordinatorError: The coordinator did not start, or not all engines registered in time.
    """

    def __init__(
        self,
        *,
        model: Decoder | nn.Module,
        tokenizer: Any,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = False,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
    ) -> None:
        self._check_mode(use_coordinator, coordinator_host, coordinator_port)
        if not isinstance(model, Decoder):
            model, tokenizer = from_megatron(model, tokenizer)
        self._world = World.current(model.ranks.position)
        self._engine = DynamicInferenceEngine.build(model, tokenizer, inference_config or InferenceConfig())
        self._direct = None if use_coordinator else DirectRuntime(self._engine)
        self._shutdown_lock = threading.Lock()
        self._shutdown_called = False
        self._thread: RuntimeThread | None = None
        self._runtime: CoordinatedRuntime | None = None
        if use_coordinator:
            self._start(coordinator_host, coordinator_port)

    @staticmethod
    def _check_mode(use_coordinator: bool, host: str | None, port: int | None) -> None:
        if not use_coordinator and (host is not None or port is not None):
            field = "coordinator_host" if host is not None else "coordinator_port"
            raise ConfigurationError("coordinator_host/port require use_coordinator=True", field=field)

    def _start(self, host: str | None, port: int | None) -> None:
        prepare = _same_cuda_device()
        runtime = CoordinatedRuntime(self._engine, self._world, host=host, port=port, prepare_thread=prepare)
        thread = RuntimeThread(prepare)
        try:
            thread.run(runtime.start())
        except BaseException:
            thread.stop()
            raise
        self._runtime, self._thread = runtime, thread

    @property
    def engine(self) -> DynamicInferenceEngine:
        """The engine; in coordinator mode only its loop may use it."""
        return self._engine

    @property
    def context(self) -> DynamicInferenceContext:
        """The engine's context."""
        return self._engine.context

    @property
    def controller(self) -> TextGenerationController:
        """The engine's controller."""
        return self._engine.controller

    @property
    def is_primary_rank(self) -> bool:
        """Whether this rank may generate: every rank in direct mode, rank 0 of the world in coordinator mode."""
        return self._runtime is None or self._world.is_primary

    @property
    def frontend_address(self) -> tuple[str, int] | None:
        """Host and port of the HTTP frontend, or None."""
        return None if self._runtime is None else self._runtime.frontend_address

    def submit(self, coro: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Run a coroutine on the background event loop, beside the engine; cancelling the future cancels it.

        Raises:
            RuntimeError: In direct mode, and after a shutdown.
        """
        return self._thread_for("submit", coro).submit(coro)

    def run_sync(self, coro: Coroutine[Any, Any, _Result]) -> _Result:
        """As `submit`, and return or raise the result.

        Raises:
            RuntimeError: In direct mode, after a shutdown, and on the background event loop itself.
        """
        return self._thread_for("run_sync", coro).run(coro)

    def _thread_for(self, method: str, coro: Coroutine[Any, Any, Any]) -> RuntimeThread:
        try:
            return self._require_runtime(method)[1]
        except BaseException:
            coro.close()
            raise

    def _require_primary(self) -> None:
        if not self.is_primary_rank:
            raise RuntimeError(
                f"generate() is for the primary rank (global rank 0), and this is rank {self._world.rank}"
            )

    def _require_runtime(self, method: str) -> tuple[CoordinatedRuntime, RuntimeThread]:
        if self._runtime is None or self._thread is None:
            raise RuntimeError(f"{method}() needs a coordinator: construct with use_coordinator=True")
        if self._shutdown_called:
            raise RuntimeError(f"{method}() was called after shutdown()")
        return self._runtime, self._thread

    def _shutdown(self) -> None:
        """End everything; a second call waits for the first."""
        with self._shutdown_lock:
            if self._shutdown_called:
                return
            self._shutdown_called = True
            if self._runtime is not None and self._thread is not None:
                try:
                    self._thread.run(self._runtime.shutdown())
                finally:
                    self._thread.stop()

    def _wait_for_shutdown(self) -> None:
        """Wait for the end of the engine's loop; returns at once in direct mode and after a shutdown."""
        if self._runtime is not None and self._thread is not None and not self._shutdown_called:
            self._thread.run(self._runtime.wait_for_shutdown())


def _same_cuda_device() -> Callable[[], None] | None:
    """Sets the current CUDA device, which is a property of a thread, in a new thread."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)

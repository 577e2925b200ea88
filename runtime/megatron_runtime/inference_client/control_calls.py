"""The calls of a client that control the service: lifecycle signals, weight updates and its state."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine
from pathlib import Path

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client.calls import ClientCalls
from megatron_runtime.sampling_params import LONGEST_NAME
from megatron_runtime.wire.service_state import ServiceState


class ControlCalls(ABC):
    """The part of InferenceClient that controls the service."""

    _calls: ClientCalls
    _strict_signals: bool

    @abstractmethod
    def _require_started(self) -> asyncio.AbstractEventLoop: ...

    def pause_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """RUNNING -> PAUSED: engines stop computing and keep their requests; new requests queue.

        Like the other signals it is sent at once, and returns an awaitable that is done when all registered engines
        have reached the state. A signal that is possible once the signals before it are carried out waits for them.

        Raises:
            InvalidStateError: (from the awaitable) the state of the service doesn't allow it.
            TransitionTimeoutError: (from the awaitable) names the engines that are missing.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        return self._send_signal_to_engines(Headers.PAUSE, timeout)

    def unpause_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED -> RUNNING; otherwise as `pause_engines`."""
        return self._send_signal_to_engines(Headers.UNPAUSE, timeout)

    def suspend_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED -> SUSPENDED: engines release memory; otherwise as `pause_engines`.

        A running service is paused first, unless the client has ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.SUSPEND, timeout)

    def resume_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """SUSPENDED -> PAUSED: engines allocate their memory again; otherwise as `pause_engines`.

        After a suspension that paused a running service, the service continues to RUNNING, unless the client has
        ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.RESUME, timeout)

    def stop_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED or SUSPENDED -> stopped: unfinished requests are aborted; otherwise as `pause_engines`.

        A running service is paused first, unless the client has ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.STOP, timeout)

    def update_weights(self, path: str | Path, timeout: float | None = None) -> Awaitable[int]:
        """In PAUSED or SUSPENDED: every engine loads a checkpoint's weights in place, from a path that each can read.

        Sent at once, as the signals. Engines that register later load the weights before they get requests: keep the
        files until the next update. To send named tensors, write them with ``safetensors.torch.save_file``, for
        example to /dev/shm.

        Returns:
            An awaitable of the version of the weights, the ``weight_version`` of results.

        Raises:
            InvalidStateError: (from the awaitable) the service is in another state.
            CheckpointError: (from the awaitable) names the engines that failed, and why; they keep their weights.
            TransitionTimeoutError: (from the awaitable) names the engines that have not answered.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        self._require_started()
        return self._calls.update_weights(str(path), timeout)

    def load_adapter(
        self, name: str, path: str | Path, timeout: float | None = None, *, replaces: bool = False
    ) -> Awaitable[None]:
        """In any state: every engine loads a LoRA adapter, from a folder that each rank can read, or none does.

        Sent at once, as the signals. Engines that register later load it before they get requests: keep the files.

        Args:
            name: The ``adapter`` of requests for it.
            path: The folder that peft's ``save_pretrained`` has written.
            timeout: Seconds until the change is undone.
            replaces: Whether an adapter of this name is replaced; requests that have begun finish with the old one.

        Raises:
            InvalidRequestError: The name is not a text of 1 to LONGEST_NAME characters; or (from the awaitable) it is
                in use.
            CheckpointError: (from the awaitable) names the engines that failed, and why.
            TransitionTimeoutError: (from the awaitable) names the engines that have not answered.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        return self._change_adapters(name, str(path), timeout, replaces=replaces)

    def unload_adapter(self, name: str, timeout: float | None = None) -> Awaitable[None]:
        """In any state: no engine accepts further requests for an adapter; those that have begun finish with it.

        Raises:
            AdapterNotFoundError: (from the awaitable) there is no adapter of this name.
            InvalidRequestError: (from the awaitable) the engines were started with it.
            TransitionTimeoutError: (from the awaitable) names the engines that have not answered.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        return self._change_adapters(name, "", timeout, replaces=False)

    def _change_adapters(self, name: str, path: str, timeout: float | None, *, replaces: bool) -> Awaitable[None]:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise InvalidRequestError(
                f"lora_name={name!r} must be a text of 1 to {LONGEST_NAME} characters", field="lora_name"
            )
        self._require_started()
        return self._calls.change_adapters(name, path, timeout, replaces=replaces)

    def set_generation_epoch(self, generation_epoch: int) -> Awaitable[None]:
        """In any state: engines stamp their requests with this epoch of a training, in ``policy_epoch`` and
        ``kv_cache_epoch``. Requests that were added before get a boundary; those that are added later begin with it.

        Sent at once, as the signals; the awaitable is done when the coordinator has passed it on.

        Raises:
            InvalidRequestError: The epoch is no natural number.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        if type(generation_epoch) is not int or generation_epoch < 0:
            raise InvalidRequestError(
                f"generation_epoch={generation_epoch!r} must be a natural number", field="generation_epoch"
            )
        self._require_started()
        return self._calls.broadcast(Headers.SET_GENERATION_EPOCH, generation_epoch)

    def increment_staleness(self) -> Awaitable[None]:
        """In any state: engines count one more weight update in ``policy_staleness`` and ``kv_cache_staleness`` of
        their unfinished requests, for a trainer that has changed the weights itself. `update_weights` counts too.

        Sent at once, as the signals; the awaitable is done when the coordinator has passed it on.

        Raises:
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        self._require_started()
        return self._calls.broadcast(Headers.INCREMENT_STALENESS)

    def reset_prefix_cache(self) -> Awaitable[None]:
        """In any state: engines forget their cached prefixes; unfinished requests keep their blocks.

        Raises:
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        self._require_started()
        return self._calls.broadcast(Headers.RESET_PREFIX_CACHE)

    def start_cuda_profiler(self) -> Awaitable[None]:
        """In any state: every rank begins a trace of its steps with PyTorch's profiler, of CPU and GPU.

        Raises:
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        self._require_started()
        return self._calls.broadcast(Headers.START_CUDA_PROFILER)

    def stop_cuda_profiler(self) -> Awaitable[None]:
        """In any state: every rank writes its trace to the folder MEGATRON_PROFILE_FOLDER; errors as above."""
        self._require_started()
        return self._calls.broadcast(Headers.STOP_CUDA_PROFILER)

    def _send_signal_to_engines(self, signal: Headers, timeout: float | None = None) -> Awaitable[None]:
        self._require_started()
        return self._calls.signal(signal, timeout, strict=self._strict_signals)

    def service_state(self, timeout: float | None = None) -> Coroutine[None, None, ServiceState]:
        """The current state of the service.

        Raises:
            CoordinatorError: No answer within ``timeout`` (10 s).
        """
        self._require_started()
        return self._calls.service_state(10.0 if timeout is None else timeout)

    def wait_for_state_change(self, after_revision: int, timeout: float) -> Coroutine[None, None, ServiceState]:
        """The state as soon as its revision is greater than ``after_revision``, or the current state at the timeout.

        Raises:
            CoordinatorError: The coordinator can't be reached at the timeout.
        """
        self._require_started()
        return self._calls.wait_for_state_change(after_revision, timeout)

"""The synchronous library API."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from megatron_runtime.apis._llm_base import _MegatronLLMBase
from megatron_runtime.apis.prompts import Prompts, params_for, refuse_media, split_prompts
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.refit import Weights
from megatron_runtime.sampling_params import SamplingParams


class MegatronLLM(_MegatronLLMBase):
    """Generates with blocking calls, from any thread, also beside an event loop; arguments as for the base class.

    In direct mode the engine runs in the calling thread, for one call at a time; all ranks of a replica group make the
    same calls. In coordinator mode calls from several threads are served together. Leaving a ``with`` block shuts down.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        multi_modal_data: None = None,
    ) -> list[DynamicInferenceRequest]:
        """Serve prompts until they are finished.

        Args:
            prompts: Text, token ids, a list of texts, or a list of token id lists.
            sampling_params: For all prompts, or one for each.
            multi_modal_data: None; other values are refused, since the supported models read text only.

        Returns:
            A list of merged requests in the order of the prompts, also for a single prompt. The ``n`` samples of a
            prompt are side by side. A request that could not be served has status FAILED and an error event.

        Raises:
            RuntimeError: This rank is not the primary one.
            TypeError: prompts has an unsupported type.
            InvalidRequestError: multi_modal_data is not None, or sampling_params and prompts differ in number.
            EngineError: The engine failed.
        """
        self._require_primary()
        refuse_media(multi_modal_data)
        several, _ = split_prompts(prompts)
        params = params_for(several, sampling_params)
        if not several:
            return []
        if self._direct is not None:
            return self._direct.generate(several, params)
        runtime, thread = self._require_runtime("generate")
        return thread.run(runtime.generate(several, params))

    def pause(self) -> None:
        """RUNNING -> PAUSED: requests keep their state. Call it on every rank, as the other transitions.

        Raises:
            RuntimeError: In direct mode.
            InvalidStateError: The state doesn't allow it.
            TransitionTimeoutError: Not all engines reached the state in time.
        """
        runtime, thread = self._require_runtime("pause")
        thread.run(runtime.pause())

    def unpause(self) -> None:
        """PAUSED -> RUNNING; errors as for `pause`."""
        runtime, thread = self._require_runtime("unpause")
        thread.run(runtime.unpause())

    def suspend(self) -> None:
        """PAUSED -> SUSPENDED: releases memory; errors as for `pause`."""
        runtime, thread = self._require_runtime("suspend")
        thread.run(runtime.suspend())

    def resume(self) -> None:
        """SUSPENDED -> PAUSED: allocates the memory again; errors as for `pause`."""
        runtime, thread = self._require_runtime("resume")
        thread.run(runtime.resume())

    def update_weights(self, weights: Weights) -> int:
        """Load other weights into the model in place. Call it on every rank, with the same weights.

        In coordinator mode between `pause` and `unpause`, also while suspended. On an error the model keeps its
        weights. Cached prefixes are dropped; requests in flight continue with the new weights and, unless a suspension
        has dropped them, with their keys and values.

        Args:
            weights: The path of a checkpoint or of a safetensors file, or all tensors by their Hugging Face names; or a
                live GPTModel of Megatron Core or its named tensors, which are shared where type and device agree.

        Returns:
            The number of weight updates, which is the ``weight_version`` of requests that end from now on.

        Raises:
            InvalidStateError: The engine is neither paused nor suspended, in coordinator mode.
            CheckpointError: The path can't be read, it is another model, or tensors are missing, unknown, of another
                shape or not finite; the error names them.
        """
        if self._direct is not None:
            return self._direct.update_weights(weights)
        runtime, thread = self._require_runtime("update_weights")
        return thread.run(runtime.update_weights(weights))

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank.

        Args:
            blocking: Return after the shutdown, on every rank; False: return when the frontend is ready.

        Raises:
            ConfigurationError: In direct mode (it is a ValueError), or the address can't be used.
        """
        if self._runtime is None:
            raise ConfigurationError("serve() requires use_coordinator=True", field="use_coordinator")
        runtime, thread = self._require_runtime("serve")
        thread.run(runtime.serve(serve_config))
        if blocking:
            self.wait_for_shutdown()

    def shutdown(self) -> None:
        """Stop engine, coordinator and frontend. Idempotent; no effect in direct mode.

        Raises:
            EngineError: The engine failed; on ranks other than the primary one, which wait for it.
        """
        self._shutdown()

    def wait_for_shutdown(self) -> None:
        """Wait until the engine has stopped; returns at once in direct mode.

        Raises:
            EngineError: The engine failed.
        """
        self._wait_for_shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()

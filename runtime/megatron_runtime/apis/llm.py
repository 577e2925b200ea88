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
    """Generates with plain calls, from any thread, also where an event loop runs; arguments as for the base class.

    In direct mode the engine works in the calling thread, for one call at a time; ranks that share a copy of the model
    make the same calls. In coordinator mode calls from several threads are served together. Leaving a ``with`` block
    shuts down.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        multi_modal_data: None = None,
    ) -> list[DynamicInferenceRequest]:
        """Serve prompts to their end.

        Args:
            prompts: Text, token ids, a list of texts, or a list of token id lists.
            sampling_params: For all prompts, or one for each.
            multi_modal_data: None. Images and the like are refused: the models that are served here read text only.

        Returns:
            A merged request for each prompt, in their order; a list also for a single prompt. The ``n`` samples of a
            prompt stand side by side. A request that could not be served has status FAILED and an error event.

        Raises:
            RuntimeError: On a rank that is not the primary one.
            TypeError: prompts have another form.
            InvalidRequestError: multi_modal_data is not None, or sampling_params are not as many as the prompts.
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
        """RUNNING -> PAUSED: requests freeze where they are. Every rank calls it, as all of these.

        Raises:
            RuntimeError: In direct mode.
            InvalidStateError: In a state that doesn't allow it.
            TransitionTimeoutError: Not all engines got there in time.
        """
        runtime, thread = self._require_runtime("pause")
        thread.run(runtime.pause())

    def unpause(self) -> None:
        """PAUSED -> RUNNING; errors as for `pause`."""
        runtime, thread = self._require_runtime("unpause")
        thread.run(runtime.unpause())

    def suspend(self) -> None:
        """PAUSED -> SUSPENDED: memory is given back; errors as for `pause`."""
        runtime, thread = self._require_runtime("suspend")
        thread.run(runtime.suspend())

    def resume(self) -> None:
        """SUSPENDED -> PAUSED: memory is taken again; errors as for `pause`."""
        runtime, thread = self._require_runtime("resume")
        thread.run(runtime.resume())

    def update_weights(self, weights: Weights) -> int:
        """Load other weights into the model in place; every rank calls it, with the same.

        In coordinator mode between `pause` and `unpause`, also while suspended. On an error the model keeps what it
        has. Cached prefixes are forgotten; requests in flight go on with the new weights, and, unless a suspension
        dropped them, with the keys and values that they have.

        Args:
            weights: A checkpoint's path, or all tensors by the names that Hugging Face gives them, which may also
                be in a safetensors file, given by its path.

        Returns:
            How often the weights were updated; results that end from now on say so as ``weight_version``.

        Raises:
            InvalidStateError: The engine is neither paused nor suspended, in coordinator mode.
            CheckpointError: A path that can't be read, another model, or tensors that are missing, unknown, misshapen
                or not finite; each named.
        """
        if self._direct is not None:
            return self._direct.update_weights(weights)
        runtime, thread = self._require_runtime("update_weights")
        return thread.run(runtime.update_weights(weights))

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank.

        Args:
            blocking: Return after the shutdown, on every rank; False returns once the frontend answers.

        Raises:
            ConfigurationError: In direct mode (it is a ValueError), or an address that can't be used.
        """
        if self._runtime is None:
            raise ConfigurationError("serve() requires use_coordinator=True", field="use_coordinator")
        runtime, thread = self._require_runtime("serve")
        thread.run(runtime.serve(serve_config))
        if blocking:
            self.wait_for_shutdown()

    def shutdown(self) -> None:
        """Stop engine, coordinator and frontend. Idempotent; nothing to do in direct mode.

        Raises:
            EngineError: On a rank other than the primary one, which waits for that one: the engine failed.
        """
        self._shutdown()

    def wait_for_shutdown(self) -> None:
        """Wait until the engine was stopped; returns at once in direct mode.

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

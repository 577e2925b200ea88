"""The asynchronous library API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from megatron_runtime.apis._llm_base import _MegatronLLMBase
from megatron_runtime.apis.prompts import Prompts, params_for, refuse_media, split_prompts
from megatron_runtime.apis.runtime_thread import RuntimeThread
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.apis.streaming import GenerationUpdate, follow
from megatron_runtime.errors import ConfigurationError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.refit import Weights
from megatron_runtime.sampling_params import SamplingParams

_Result = TypeVar("_Result")


class MegatronAsyncLLM(_MegatronLLMBase):
    """Generates with coroutines, on any event loop; arguments as for the base class, of which it needs the coordinator.

    Cancelling a call aborts its requests. Leaving an ``async with`` block shuts down.
    """

    @staticmethod
    def _check_mode(use_coordinator: bool, host: str | None, port: int | None) -> None:
        if not use_coordinator:
            raise ConfigurationError(
                "MegatronAsyncLLM requires use_coordinator=True; use MegatronLLM for direct mode",
                field="use_coordinator",
            )
        _MegatronLLMBase._check_mode(use_coordinator, host, port)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        multi_modal_data: None = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Serve prompts to their end.

        Args:
            prompts: Text, token ids, a list of texts, or a list of token id lists.
            sampling_params: For all prompts, or one for each.
            multi_modal_data: None. Images and the like are refused: the models that are served here read text only.

        Returns:
            The merged request for a single prompt with a single sample, else a list of them in the order of the
            prompts, the ``n`` samples of a prompt side by side. A request that could not be served has status FAILED
            and an error event.

        Raises:
            RuntimeError: On a rank that is not the primary one.
            TypeError: prompts have another form.
            InvalidRequestError: multi_modal_data is not None, or sampling_params are not as many as the prompts.
            EngineError: The engine failed.
        """
        self._require_primary()
        refuse_media(multi_modal_data)
        several, is_single = split_prompts(prompts)
        params = params_for(several, sampling_params)
        if not several:
            return []
        runtime, thread = self._require_runtime("generate")
        requests = await _on(thread, runtime.generate(several, params))
        return requests[0] if is_single and len(requests) == 1 else requests

    def generate_stream(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Serve one prompt, and follow the answer as it comes: ``async for update in llm.generate_stream(prompt)``.

        The last update has the merged request. Closing the generator, or being cancelled in it, aborts the request.

        Args:
            prompt: Text, or token ids.
            sampling_params: With ``n=1``; ``streaming_interval`` counts where ``streaming`` is set.

        Raises:
            RuntimeError: On a rank that is not the primary one.
            TypeError: The prompt has another form, or is a batch.
            InvalidRequestError: ``n`` is not 1.
            EngineError: (while iterating) the engine failed.
        """
        self._require_primary()
        several, is_single = split_prompts(prompt)
        if not is_single:
            raise TypeError("a stream is for a single prompt, text or a list of token ids; open one for each")
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n}: a stream has one answer; open one for each, with n=1", field="n")
        runtime, thread = self._require_runtime("generate_stream")
        detokenizer = self._engine.tokenizer.incremental()
        return follow(lambda: runtime.open_stream(several[0], params), detokenizer, lambda work: _on(thread, work))

    async def pause(self) -> None:
        """RUNNING -> PAUSED: requests freeze where they are. Every rank calls it, as all of these.

        Raises:
            InvalidStateError: In a state that doesn't allow it.
            TransitionTimeoutError: Not all engines got there in time.
        """
        runtime, thread = self._require_runtime("pause")
        await _on(thread, runtime.pause())

    async def unpause(self) -> None:
        """PAUSED -> RUNNING; errors as for `pause`."""
        runtime, thread = self._require_runtime("unpause")
        await _on(thread, runtime.unpause())

    async def suspend(self) -> None:
        """PAUSED -> SUSPENDED: memory is given back; errors as for `pause`."""
        runtime, thread = self._require_runtime("suspend")
        await _on(thread, runtime.suspend())

    async def resume(self) -> None:
        """SUSPENDED -> PAUSED: memory is taken again; errors as for `pause`."""
        runtime, thread = self._require_runtime("resume")
        await _on(thread, runtime.resume())

    async def update_weights(self, weights: Weights) -> int:
        """Load other weights into the model in place; every rank calls it, with the same.

        Between `pause` and `unpause`, also while suspended. On an error the model keeps what it has.
        Cached prefixes are forgotten; requests in flight go on with the new weights, and, unless a suspension dropped
        them, with the keys and values that they have.

        Args:
            weights: A checkpoint's path, or all tensors by the names that Hugging Face gives them, which may also
                be in a safetensors file, given by its path.

        Returns:
            How often the weights were updated; results that end from now on say so as ``weight_version``.

        Raises:
            InvalidStateError: The engine is neither paused nor suspended.
            CheckpointError: A path that can't be read, another model, or tensors that are missing, unknown, misshapen
                or not finite; each named.
        """
        runtime, thread = self._require_runtime("update_weights")
        return await _on(thread, runtime.update_weights(weights))

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank.

        Args:
            blocking: Return after the shutdown, on every rank; False returns once the frontend answers.

        Raises:
            ConfigurationError: An address that can't be used.
        """
        runtime, thread = self._require_runtime("serve")
        await _on(thread, runtime.serve(serve_config))
        if blocking:
            await self.wait_for_shutdown()

    async def shutdown(self) -> None:
        """Stop engine, coordinator and frontend. Idempotent.

        Raises:
            EngineError: On a rank other than the primary one, which waits for that one: the engine failed.
        """
        await asyncio.to_thread(self._shutdown)

    async def wait_for_shutdown(self) -> None:
        """Wait until the engine was stopped.

        Raises:
            EngineError: The engine failed.
        """
        if self._shutdown_called:
            return
        runtime, thread = self._require_runtime("wait_for_shutdown")
        await _on(thread, runtime.wait_for_shutdown())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.shutdown()


async def _on(thread: RuntimeThread, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    return await asyncio.wrap_future(thread.submit(coroutine))

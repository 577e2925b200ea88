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
from megatron_runtime.apis.streaming import GenerationUpdate, stream_updates
from megatron_runtime.errors import ConfigurationError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.refit import Weights
from megatron_runtime.sampling_params import SamplingParams

_Result = TypeVar("_Result")


class MegatronAsyncLLM(_MegatronLLMBase):
    """Generates with coroutines, on any event loop; arguments as for the base class, with ``use_coordinator=True``.

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
        """Serve prompts until they are finished.

        Args:
            prompts: Text, token ids, a list of texts, or a list of token id lists.
            sampling_params: For all prompts, or one for each.
            multi_modal_data: None; other values are refused, since the supported models read text only.

        Returns:
            The merged request for a single prompt with a single sample, else a list of them in the order of the
            prompts, the ``n`` samples of a prompt side by side. A request that could not be served has status FAILED
            and an error event.

        Raises:
            RuntimeError: This rank is not the primary one.
            TypeError: prompts has an unsupported type.
            InvalidRequestError: multi_modal_data is not None, or sampling_params and prompts differ in number.
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
        """Serve one prompt and stream the answer: ``async for update in llm.generate_stream(prompt)``.

        The last update has the merged request. Closing the generator, or cancelling its task, aborts the request.

        Args:
            prompt: Text or token ids.
            sampling_params: With ``n=1``; ``streaming_interval`` has an effect with ``streaming``.

        Raises:
            RuntimeError: This rank is not the primary one.
            TypeError: The prompt has an unsupported type, or is a batch.
            InvalidRequestError: ``n`` is not 1.
            EngineError: (while iterating) the engine failed.
        """
        self._require_primary()
        several, is_single = split_prompts(prompt)
        if not is_single:
            raise TypeError("a stream has a single prompt, text or a list of token ids; open one for each")
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n}: a stream has one answer; open one for each, with n=1", field="n")
        runtime, thread = self._require_runtime("generate_stream")
        detokenizer = self._engine.tokenizer.incremental()
        return stream_updates(
            lambda: runtime.open_stream(several[0], params), detokenizer, lambda work: _on(thread, work)
        )

    async def pause(self) -> None:
        """RUNNING -> PAUSED: requests keep their state. Call it on every rank, as the other transitions.

        Raises:
            InvalidStateError: The state doesn't allow it.
            TransitionTimeoutError: Not all engines reached the state in time.
        """
        runtime, thread = self._require_runtime("pause")
        await _on(thread, runtime.pause())

    async def unpause(self) -> None:
        """PAUSED -> RUNNING; errors as for `pause`."""
        runtime, thread = self._require_runtime("unpause")
        await _on(thread, runtime.unpause())

    async def suspend(self) -> None:
        """PAUSED -> SUSPENDED: releases memory; errors as for `pause`."""
        runtime, thread = self._require_runtime("suspend")
        await _on(thread, runtime.suspend())

    async def resume(self) -> None:
        """SUSPENDED -> PAUSED: allocates the memory again; errors as for `pause`."""
        runtime, thread = self._require_runtime("resume")
        await _on(thread, runtime.resume())

    async def update_weights(self, weights: Weights) -> int:
        """Load other weights into the model in place. Call it on every rank, with the same weights.

        Between `pause` and `unpause`, also while suspended. On an error the model keeps its weights. Cached prefixes
        are dropped; requests in flight continue with the new weights and, unless a suspension has dropped them, with
        their keys and values.

        Args:
            weights: The path of a checkpoint or of a safetensors file, or all tensors by their Hugging Face names; or a
                live GPTModel of Megatron Core or its named tensors, which are shared where type and device agree.

        Returns:
            The number of weight updates, which is the ``weight_version`` of requests that end from now on.

        Raises:
            InvalidStateError: The engine is neither paused nor suspended.
            CheckpointError: The path can't be read, it is another model, or tensors are missing, unknown, of another
                shape or not finite; the error names them.
        """
        runtime, thread = self._require_runtime("update_weights")
        return await _on(thread, runtime.update_weights(weights))

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Serve the OpenAI API over HTTP on the primary rank.

        Args:
            blocking: Return after the shutdown, on every rank; False: return when the frontend is ready.

        Raises:
            ConfigurationError: The address can't be used.
        """
        runtime, thread = self._require_runtime("serve")
        await _on(thread, runtime.serve(serve_config))
        if blocking:
            await self.wait_for_shutdown()

    async def shutdown(self) -> None:
        """Stop engine, coordinator and frontend. Idempotent.

        Raises:
            EngineError: The engine failed; on ranks other than the primary one, which wait for it.
        """
        await asyncio.to_thread(self._shutdown)

    async def wait_for_shutdown(self) -> None:
        """Wait until the engine has stopped.

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

"""Fields of vLLM's API that chat and text completions share, beside the sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from megatron_runtime.server.bodies.only import Only

# The length apart from the pattern: a counted repetition of \w takes 50 ms to compile at the start of each frontend.
RequestId = Annotated[str, Field(pattern=r"^[\w.:-]+$", max_length=128)]


class VllmFields(BaseModel):
    """vLLM's fields under their names; those that are not implemented accept only a neutral value."""

    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None
    spaces_between_special_tokens: bool = True
    """Has no effect, as in vLLM with the fast tokenizers that this server reads."""

    use_beam_search: Annotated[bool, Only(False)] = False
    length_penalty: Annotated[float, Only(1)] = 1.0
    best_of: Annotated[int, Only(1)] = 1
    guided_decoding_backend: Annotated[Any, Only(None)] = None
    guided_whitespace_pattern: Annotated[Any, Only(None)] = None
    structural_tag: Annotated[Any, Only(None)] = None
    logits_processors: Annotated[Any, Only(None, [])] = None
    repetition_detection: Annotated[Any, Only(None)] = None
    truncation_side: Annotated[str, Only("left")] = "left"
    kv_transfer_params: Annotated[Any, Only(None, {})] = None
    vllm_xargs: Annotated[Any, Only(None, {})] = None
    prompt_embeds: Annotated[Any, Only(None, [])] = None
    multi_modal_data: Annotated[Any, Only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, Only(None, {})] = None
    media_io_kwargs: Annotated[Any, Only(None, {})] = None
    mm_payload: Annotated[Any, Only(None, {})] = None
    return_mm_kwargs: Annotated[Any, Only(None, True, False)] = None
    """Has no effect, as in vLLM on these paths."""
    logprob_token_ids: Annotated[Any, Only(None, [])] = None
    return_prompt_text: Annotated[Any, Only(None, False)] = None
    return_token_offsets: Annotated[Any, Only(None, False)] = None
    routed_experts_prompt_start: Annotated[Any, Only(None, 0)] = None
    ec_transfer_params: Annotated[Any, Only(None, {})] = None
    session_id: Annotated[Any, Only(None, "")] = None
    watermarking: Annotated[Any, Only(None, False, {})] = None

"""Content of ``/openapi.json`` beside the body schemas: examples of requests and answers, and the error schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetails(BaseModel):
    """Why a request failed. ``param`` is the field that caused the error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response other than 2xx."""

    error: ErrorDetails


_USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_HEAD = {"created": 1780000000, "model": "smollm2"}
_HELLO = {"role": "user", "content": "Say hello."}

CHAT_REQUEST = {"model": "smollm2", "messages": [_HELLO], "max_tokens": 20, "temperature": 0}
CHAT_ANSWER = {
    "id": "chatcmpl-0b5c",
    "object": "chat.completion",
    **_HEAD,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
    "system_fingerprint": "weights-0",
}
COMPLETION_REQUEST = {"model": "smollm2", "prompt": "Water boils at", "max_tokens": 5, "temperature": 0}
COMPLETION_ANSWER = {
    "id": "cmpl-0b5c",
    "object": "text_completion",
    **_HEAD,
    "choices": [{"index": 0, "text": " 100 degrees", "logprobs": None, "finish_reason": "length"}],
    "usage": _USAGE,
    "system_fingerprint": "weights-0",
}
RESPONSE_REQUEST = {"model": "smollm2", "input": "Say hello.", "max_output_tokens": 20}
RESPONSE_ANSWER = {
    "id": "resp_0b5c",
    "object": "response",
    "created_at": 1780000000,
    "status": "completed",
    "model": "smollm2",
    "output": [
        {
            "type": "message",
            "id": "msg_0b5c",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
        }
    ],
    "usage": {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14},
}
MESSAGE_REQUEST = {"model": "smollm2", "max_tokens": 20, "messages": [_HELLO]}
MESSAGE_ANSWER = {
    "id": "msg_0b5c",
    "type": "message",
    "role": "assistant",
    "model": "smollm2",
    "content": [{"type": "text", "text": "Hello!", "citations": None}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 9, "output_tokens": 5, "cache_read_input_tokens": 0},
}
EMBEDDINGS_REQUEST = {"model": "smollm2", "input": ["Paris is in France.", "Water boils at 100 degrees."]}
EMBEDDINGS_ANSWER = {
    "id": "embd-0b5c",
    "object": "list",
    **_HEAD,
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456, 0.0789]}],
    "usage": {"prompt_tokens": 12, "total_tokens": 12},
}
SCORE_REQUEST = {"model": "smollm2", "queries": "Where is Paris?", "documents": ["Paris is in France.", "Water boils."]}
SCORE_ANSWER = {
    "id": "score-0b5c",
    "object": "list",
    **_HEAD,
    "data": [{"object": "score", "index": 0, "score": 0.93}, {"object": "score", "index": 1, "score": 0.71}],
    "usage": {"prompt_tokens": 13, "total_tokens": 13},
}
COUNT_TOKENS_REQUEST = {"model": "smollm2", "messages": [_HELLO]}
COUNT_TOKENS_ANSWER = {"input_tokens": 9}
MODEL_ANSWER = {
    "id": "smollm2",
    "object": "model",
    "created": 1780000000,
    "owned_by": "megatron",
    "max_model_len": 8192,
}
MODELS_ANSWER = {"object": "list", "data": [MODEL_ANSWER]}
STATUS_ANSWER = {
    "model": "smollm2",
    "max_model_len": 8192,
    "ready": True,
    "state": "RUNNING",
    "requests_running": 3,
    "requests_waiting": 0,
    "replica_groups": [
        {
            "index": 0,
            "attempt": 0,
            "state": "RUNNING",
            "ready": True,
            "draining": False,
            "requests_running": 3,
            "requests_waiting": 0,
            "kv_usage": 0.12,
            "prompt_tokens": 5210,
            "generated_tokens": 20934,
            "weight_version": 0,
        }
    ],
}
TOKENIZE_REQUEST = {"model": "smollm2", "prompt": "Hello"}
TOKENIZE_ANSWER = {"count": 1, "max_model_len": 8192, "tokens": [19556], "token_strs": None}
DETOKENIZE_REQUEST = {"model": "smollm2", "tokens": [19556]}
DETOKENIZE_ANSWER = {"prompt": "Hello"}
TOKENIZER_INFO_ANSWER = {
    "eos_token": "<|im_end|>",
    "bos_token": "<|im_start|>",
    "chat_template": "{% for message in messages %}...",
    "model_max_length": 8192,
}


def answers(example: dict[str, Any], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route: an example of its answer, and the error schema."""
    content: dict[str, Any] = {"application/json": {"example": example}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        200: {"description": "The answer; with stream: true, server-sent events", "content": content},
        "4XX": {"model": ErrorBody, "description": "The request is invalid or was rejected; the error says why"},
        "5XX": {"model": ErrorBody, "description": "The server can't answer now; retry after Retry-After seconds"},
    }


def request_example(example: dict[str, Any]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route, with an example of its request body."""
    return {"requestBody": {"content": {"application/json": {"example": example}}}}

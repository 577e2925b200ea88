"""The client of the coordinator, and its results."""

from megatron_runtime.inference_client.client import InferenceClient
from megatron_runtime.inference_client.outstanding import RequestStream
from megatron_runtime.inference_client.result import InferenceResult, StreamUpdate

__all__ = ["InferenceClient", "InferenceResult", "RequestStream", "StreamUpdate"]

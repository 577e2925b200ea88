"""The record of a request: its segments between evictions."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_request.dynamic_request import DynamicInferenceRequest

if TYPE_CHECKING:
    from torch import Tensor

_JOINED_LISTS = ("generated_log_probs", "generated_top_n_logprobs", "tpot")


@dataclass
class DynamicInferenceRequestRecord:
    """The segments of one request; a checkpoint closes a segment and opens the next."""

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None
    """Seconds from submission to the end."""

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> DynamicInferenceRequestRecord:
        """A record whose first segment is the request."""
        return cls(requests=[request])

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        return self.requests[idx]

    @property
    def request_id(self) -> int:
        """Id of the request; all segments share it."""
        return self.requests[0].request_id

    @staticmethod
    def _update_staleness_tensor(tensor: Tensor | None, total_tokens: int, increment: bool = True) -> Tensor:
        """The int32 counters, created or extended with zeros to the length, incremented if requested."""
        import torch  # imported here: clients and frontends do not need it

        counters = torch.zeros(total_tokens, dtype=torch.int32)
        if tensor is not None:
            counters[: tensor.numel()] = tensor
        return counters + 1 if increment else counters

    def increment_staleness(self, policy_only: bool = False) -> None:
        """Count one more weight update for every token so far.

        Args:
            policy_only: Leave the KV cache's counters alone, for a request that has nothing cached.
        """
        request = self.requests[-1]
        total = request.total_tokens
        request.policy_staleness = self._update_staleness_tensor(request.policy_staleness, total)
        if not policy_only:
            request.kv_cache_staleness = self._update_staleness_tensor(request.kv_cache_staleness, total)

    def stamp_epoch(self, epoch: int) -> None:
        """The tokens from the next one on belong to this generation epoch; all of them, if there was none before."""
        request = self.requests[-1]
        for name in ("policy_epoch", "kv_cache_epoch"):
            known = getattr(request, name)
            stamps = [(0, epoch)] if known is None else [*known, (request.total_tokens - 1, epoch)]
            setattr(request, name, stamps)

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Close the last segment and open one whose prompt has all tokens so far.

        Args:
            tokenizer: Not used any more.
        """
        import torch

        del tokenizer
        old = self.requests[-1]
        assert old.prompt_tokens is not None, "only a tokenized request can be checkpointed"
        generated = torch.tensor(old.generated_tokens, dtype=old.prompt_tokens.dtype)
        new = DynamicInferenceRequest(
            request_id=old.request_id,
            prompt_tokens=torch.cat((old.prompt_tokens, generated)),
            sampling_params=_remaining_params(old),
            arrival_time=old.arrival_time,
            status=old.status,
            stop_word_ids=old.stop_word_ids,
            block_size_tokens=old.block_size_tokens,
            enable_prefix_caching=old.enable_prefix_caching,
            adapter_digest=old.adapter_digest,
        )
        for name in _JOINED_LISTS:
            setattr(new, name, None if getattr(old, name) is None else [])
        self._carry_staleness(old, new)
        new.policy_epoch = None if old.policy_epoch is None else list(old.policy_epoch)
        new.event_add_engine = old.event_add_engine
        if new.event_add_engine is None:
            new.add_event_add_engine()
        self.requests.append(new)

    def _carry_staleness(self, old: DynamicInferenceRequest, new: DynamicInferenceRequest) -> None:
        """Tokens keep their policy staleness; their cache entries will be computed anew."""
        total = old.total_tokens
        if old.policy_staleness is not None:
            new.policy_staleness = self._update_staleness_tensor(old.policy_staleness, total, increment=False)
        if old.kv_cache_staleness is not None:
            new.kv_cache_staleness = self._update_staleness_tensor(None, total, increment=False)

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """All segments as one request, as if it had never been evicted.

        Args:
            tokenizer: Not used any more.
        """
        del tokenizer
        first, last = self.requests[0], self.requests[-1]
        tokens = [token for request in self.requests for token in request.generated_tokens]
        total = first.total_tokens - len(first.generated_tokens) + len(tokens)
        merged = copy.copy(first)
        merged.sampling_params = copy.deepcopy(first.sampling_params)
        merged.status = last.status
        merged.finish_reason = last.finish_reason
        merged.stop_reason = last.stop_reason
        merged.weight_version = last.weight_version
        merged.latency = self.latency
        merged.policy_epoch = last.policy_epoch
        merged.kv_cache_epoch = last.kv_cache_epoch
        merged.generated_tokens = tokens
        merged.generated_length = len(tokens)
        merged.generated_text = self._joined_text()
        merged.events = [event for request in self.requests for event in request.events]
        merged.remaining_prompt_tokens = last.remaining_prompt_tokens
        merged.routing_indices = self._joined_routing()
        merged.policy_staleness = self._update_staleness_tensor(last.policy_staleness, total, increment=False)
        merged.kv_cache_staleness = self._update_staleness_tensor(last.kv_cache_staleness, total, increment=False)
        for name in _JOINED_LISTS:
            setattr(merged, name, self._joined_list(name))
        return merged

    def _joined_text(self) -> str | None:
        parts = [request.generated_text for request in self.requests]
        return None if None in parts else "".join(part for part in parts if part)

    def _joined_list(self, name: str) -> list[Any] | None:
        if getattr(self.requests[0], name) is None:
            return None
        return [value for request in self.requests for value in getattr(request, name) or []]

    def _joined_routing(self) -> Tensor | None:
        import torch

        parts = [request.routing_indices for request in self.requests if request.routing_indices is not None]
        return torch.cat(parts) if parts else None

    def serialize(self) -> dict[str, Any]:
        """The record as plain values for msgpack."""
        return {"requests": [request.serialize() for request in self.requests], "latency": self.latency}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> DynamicInferenceRequestRecord:
        """The inverse of serialize."""
        requests = [DynamicInferenceRequest.deserialize(request) for request in obj["requests"]]
        return cls(requests=requests, latency=obj.get("latency"))


def _remaining_params(request: DynamicInferenceRequest) -> Any:
    """The parameters with ``min_tokens`` and ``num_tokens_to_generate`` reduced by the tokens generated so far.

    A limit of the total needs no change: the tokens so far are part of the new prompt.
    """
    params = copy.deepcopy(request.sampling_params)
    if params is not None:
        params.min_tokens = max(0, params.min_tokens - len(request.generated_tokens))
        if params.num_tokens_to_generate is not None:
            params.num_tokens_to_generate -= len(request.generated_tokens)
    return params

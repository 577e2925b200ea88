"""The recurrent computations of a flat batch: compiled kernels on a CPU, PyTorch's operators elsewhere.

Both compute one token after the other from the state that the last one left, so that a prompt in chunks has the same
states as a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels import delta_kernels, mamba_kernels
from megatron_runtime.model.kernels.compiled import even_shares
from megatron_runtime.model.kernels.recurrent_kernels import convolution_kernel
from megatron_runtime.model.recurrent_config import Mamba2Config, RecurrentConfig


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the gated delta rule for T tokens, float32; those of tokens can be views."""

    queries: Tensor
    """[T, key heads, key dim]; queries and keys are normalized by the rule."""
    keys: Tensor
    values: Tensor
    """[T, value heads, value dim]."""
    steps: Tensor
    """[T, value heads]: the decay of a head is ``exp(-rate * softplus(step + bias))``."""
    strengths: Tensor
    """[T, value heads], before the sigmoid: how much of a key's old value is replaced."""
    rates: Tensor
    """[value heads]."""
    biases: Tensor
    """[value heads]."""


@dataclass(frozen=True)
class ScanInputs:
    """The inputs of the selective state space model for T tokens, float32; those of tokens can be views."""

    queries: Tensor
    """[T, key heads, key dim]: C."""
    keys: Tensor
    """Of the same shape: B."""
    values: Tensor
    """[T, value heads, value dim]: x."""
    steps: Tensor
    """[T, value heads]: the time step of a head is ``softplus(step + bias)``, within the limits."""
    rates: Tensor
    """[value heads]: minus A."""
    biases: Tensor
    """[value heads]."""
    skips: Tensor
    """[value heads]: D."""
    limits: tuple[float, float]


class RecurrentPlan:
    """The requests of one batch, in the order of their rows, and the slots of their states.

    A request whose first token is in the batch begins with states of zeros, whatever its slot contains.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        assert batch.state_slots is not None, "a model with recurrent layers needs slots for their states"
        self._slots = batch.state_slots
        self._starts = batch.query_starts.long()
        self._is_new = (batch.context_lengths == batch.query_starts.diff()).long()

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
        """``silu`` of the causal convolution of each channel; updates the states.

        Args:
            inputs: float32 [T, channels].
            weight: float32 [taps, channels].
            bias: float32 [channels].
            states: float32 [slots, taps - 1, channels], the last inputs of each sequence.

        Returns:
            float32 [T, channels].
        """
        if inputs.device.type != "cpu":
            return self.convolve_in_torch(inputs, weight, bias, states)
        outputs = torch.empty_like(inputs)
        arrays = (inputs, weight, bias, states, self._slots, self._starts, self._is_new, outputs)
        convolution_kernel()(*(each.numpy() for each in arrays), even_shares(inputs.shape[1]))
        return outputs

    def delta_rule(self, inputs: DeltaInputs, states: Tensor) -> Tensor:
        """The gated delta rule (Yang et al., Gated Delta Networks); updates the states.

        Each head has a matrix S. A token makes ``S = decay * S``, then ``S = S + k (strength * (v - k^T S))^T``, and
        its output is ``q^T S``.

        Args:
            inputs: Those of T tokens.
            states: float32 [slots, value heads, key dim, value dim].

        Returns:
            float32 [T, value heads, value dim].
        """
        if states.device.type != "cpu":
            return self.delta_rule_in_torch(inputs, states)
        outputs = torch.empty_like(inputs.values)
        tokens = (inputs.queries, inputs.keys, inputs.values, inputs.steps, inputs.strengths)
        others = (inputs.rates, inputs.biases, states, self._slots, self._starts, self._is_new, outputs)
        arrays = (each.numpy() for each in (*tokens, *others))
        delta_kernels.delta_kernel()(*arrays, even_shares(states.shape[1]))
        return outputs

    def selective_scan(self, inputs: ScanInputs, states: Tensor) -> Tensor:
        """The selective state space model of Mamba-2 (Dao and Gu); updates the states.

        Each head has a matrix S. A token makes ``S = exp(-rate * step) * S + k (step * v)^T``, and its output is
        ``q^T S + skip * v``.

        Args:
            inputs: Those of T tokens.
            states: float32 [slots, value heads, key dim, value dim].

        Returns:
            float32 [T, value heads, value dim].
        """
        if states.device.type != "cpu":
            return self.selective_scan_in_torch(inputs, states)
        outputs = torch.empty_like(inputs.values, memory_format=torch.contiguous_format)
        tokens = (inputs.queries, inputs.keys, inputs.values, inputs.steps, inputs.rates, inputs.biases, inputs.skips)
        others = (states, self._slots, self._starts, self._is_new, outputs)
        mamba_kernels.scan_kernel()(
            *(each.numpy() for each in tokens),
            *inputs.limits,
            *(each.numpy() for each in others),
            even_shares(states.shape[1]),
        )
        return outputs

    def convolve_in_torch(self, inputs: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
        """`convolve` on any device."""
        taps = len(weight)
        known = states[self._slots] * (1 - self._is_new)[:, None, None]
        pieces: list[Tensor] = []
        for state, rows, slot in zip(known, torch.split(inputs, self._lengths()), self._slots, strict=True):
            window = torch.cat((state, rows))
            pieces.append(sum((weight[tap] * window[tap : tap + len(rows)] for tap in range(taps)), bias))
            states[slot] = window[len(rows) :]
        return functional.silu(torch.cat(pieces))

    def delta_rule_in_torch(self, inputs: DeltaInputs, states: Tensor) -> Tensor:
        """`delta_rule` on any device."""
        together = inputs.values.shape[1] // inputs.keys.shape[1]
        queries, keys = (_unit(each).repeat_interleave(together, 1) for each in (inputs.queries, inputs.keys))
        queries = queries * queries.shape[-1] ** -0.5
        decays = torch.exp(-inputs.rates * functional.softplus(inputs.steps + inputs.biases))
        strengths = torch.sigmoid(inputs.strengths)

        def advance(matrices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            matrices = matrices * decays[rows][..., None, None]
            seen = (matrices * keys[rows][..., None]).sum(-2)
            update = (inputs.values[rows] - seen) * strengths[rows][..., None]
            matrices = matrices + keys[rows][..., None] * update[..., None, :]
            return matrices, (matrices * queries[rows][..., None]).sum(-2)

        return self._for_each_token(states, torch.empty_like(inputs.values), advance)

    def selective_scan_in_torch(self, inputs: ScanInputs, states: Tensor) -> Tensor:
        """`selective_scan` on any device."""
        together = inputs.values.shape[1] // inputs.keys.shape[1]
        steps = functional.softplus(inputs.steps + inputs.biases).clamp(*inputs.limits)
        decays = torch.exp(-inputs.rates * steps)

        def advance(matrices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            # Repeated here, because those of all tokens take more memory than all other inputs.
            queries, keys = (each[rows].repeat_interleave(together, 1) for each in (inputs.queries, inputs.keys))
            values = inputs.values[rows]
            update = steps[rows][..., None] * values
            matrices = matrices * decays[rows][..., None, None] + keys[..., None] * update[..., None, :]
            return matrices, (matrices * queries[..., None]).sum(-2) + inputs.skips[:, None] * values

        return self._for_each_token(states, torch.empty_like(inputs.values), advance)

    def _for_each_token(
        self, states: Tensor, outputs: Tensor, advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """``advance`` the matrices of the requests by one row of each after the other. Returns ``outputs``, filled."""
        lengths = torch.tensor(self._lengths())
        current = states[self._slots]
        current[self._is_new.bool()] = 0.0
        for step in range(int(lengths.max())):
            active = (lengths > step).nonzero()[:, 0].to(states.device)
            rows = self._starts[active] + step
            current[active], outputs[rows] = advance(current[active], rows)
        states[self._slots] = current
        return outputs

    def _lengths(self) -> list[int]:
        """The number of tokens of each request."""
        lengths: list[int] = self._starts.diff().tolist()
        return lengths


def prepare_recurrence(config: RecurrentConfig) -> None:
    """Compile the kernels of these layers for a CPU now, so that the first request does not wait for it."""
    (mamba_kernels if isinstance(config, Mamba2Config) else delta_kernels).prepare()


def gated_rms_norm(rows: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) * silu(gate)`` over the last dimension, float32.

    Args:
        rows: [T, heads, size]; on a CPU they are overwritten.
        gates: Of the same shape.
        weight: [size].
        eps: Epsilon of the norm.
    """
    if rows.device.type != "cpu":
        return functional.rms_norm(rows, weight.shape, weight, eps) * functional.silu(gates)
    flat = rows.view(-1, len(weight))
    delta_kernels.gated_norm_kernel()(
        flat.numpy(), gates.reshape(flat.shape).numpy(), weight.numpy(), eps, even_shares(len(flat))
    )
    return rows


def gated_group_norm(rows: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * silu(gate)``, and ``weight * x / sqrt(mean(x^2) + eps)`` of it over each group of channels, float32.

    Args:
        rows: [T, groups, size]; on a CPU they are overwritten.
        gates: Of the same shape.
        weight: [groups, size].
        eps: Epsilon of the norm.
    """
    if rows.device.type != "cpu":
        return weight * functional.rms_norm(rows * functional.silu(gates), rows.shape[-1:], eps=eps)
    arrays = (each.numpy() for each in (rows, gates, weight))
    mamba_kernels.group_norm_kernel()(*arrays, eps, even_shares(len(rows)))
    return rows


def _unit(vectors: Tensor) -> Tensor:
    """Vectors of length one."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + delta_kernels.EPS)

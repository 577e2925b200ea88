"""The networks of all experts of a layer as a few products on a GPU, for which the host need not know the choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.layers import FeedForward, Linear

if TYPE_CHECKING:
    from megatron_runtime.gpu.experts import ExpertNetworks, ScatteredTensors


def group_networks(networks: Sequence[nn.Module]) -> ExpertNetworks | str:
    """The networks for the kernels of `gpu.experts`, or why these can't compute them.

    The result has the addresses of the weights: it is invalid once they move. Copies into them are seen.
    """
    members = [network for network in networks if isinstance(network, FeedForward)]
    if not members or len(members) < len(networks):
        return "they are no feed-forward networks of this project"
    linears = [linear for network in members for linear in (network.gate_up, network.down)]
    if not all(type(linear) is Linear for linear in linears):
        return "their matrices are quantized"
    weights = [weight for linear in linears for weight in linear.parameters()]
    if not all(has_gpu_row_kernels(weight) for weight in weights):
        return "no kernel supports their type or device"
    from megatron_runtime.gpu.experts import ALIGNMENT, ExpertNetworks

    if not all(weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0 for weight in weights):
        return "their matrices are not contiguous"
    one, clamped = members[0], members[0].clamped_gate
    return ExpertNetworks(
        gate_up=_scattered(network.gate_up.weight for network in members),
        down=_scattered(network.down.weight for network in members),
        gate_up_biases=_biases([network.gate_up for network in members]),
        down_biases=_biases([network.down for network in members]),
        is_gated=one.gated or clamped is not None,
        activation=one.activation,
        clamped=None if clamped is None else (clamped.alpha, clamped.limit),
    )


def _biases(linears: Sequence[Linear]) -> ScatteredTensors | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return _scattered(biases) if biases else None


def _scattered(tensors: Iterable[Tensor]) -> ScatteredTensors:
    from megatron_runtime.gpu.experts import ScatteredTensors

    return ScatteredTensors.of(list(tensors))

"""The networks of all experts of a layer as a few products on a GPU, for which the host need not know the choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.kernels.triton_support import has_triton
from megatron_runtime.model.layers import FeedForward, Linear
from megatron_runtime.model.quantized.float8_linear import Float8Linear

if TYPE_CHECKING:
    from megatron_runtime.gpu.experts import ExpertNetworks, ScatteredMatrices, ScatteredTensors


def group_networks(networks: Sequence[nn.Module]) -> ExpertNetworks | str:
    """The networks for the kernels of `gpu.experts`, or why these can't compute them.

    The result has the addresses of the weights: it is invalid once they move. Copies into them are seen.
    """
    members = [network for network in networks if isinstance(network, FeedForward)]
    if not members or len(members) < len(networks):
        return "they are no feed-forward networks of this project"
    roles: list[list[nn.Module]] = [[each.gate_up for each in members], [each.down for each in members]]
    linears = [linear for role in roles for linear in role]
    if not all(type(linear) in (Linear, Float8Linear) for linear in linears):
        return "their matrices are quantized to integers"
    weights = [weight for linear in linears for weight in linear.parameters()]
    plain = [weight for linear in linears if isinstance(linear, Linear) for weight in linear.parameters()]
    if not all(map(has_gpu_row_kernels, plain)) or weights[0].device.type != "cuda" or not has_triton():
        return "no kernel supports their type or device"
    if any(len({getattr(linear, "kernel_key", None) for linear in role}) > 1 for role in roles):
        return "their matrices have different types, or scales for different columns"
    from megatron_runtime.gpu.experts import ALIGNMENT, ExpertNetworks

    if not all(weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0 for weight in weights):
        return "their matrices are not contiguous"
    one, clamped = members[0], members[0].clamped_gate
    return ExpertNetworks(
        gate_up=_matrices(roles[0]),
        down=_matrices(roles[1]),
        gate_up_biases=_biases(roles[0]),
        down_biases=_biases(roles[1]),
        is_gated=one.gated or clamped is not None,
        activation=one.activation,
        clamped=None if clamped is None else (clamped.alpha, clamped.limit),
    )


def _matrices(linears: Sequence[nn.Module]) -> ScatteredMatrices:
    from megatron_runtime.gpu.experts import ScatteredMatrices
    from megatron_runtime.gpu.float8 import EXPONENTS

    float8 = [linear for linear in linears if isinstance(linear, Float8Linear)]
    if not float8:
        return ScatteredMatrices(_scattered(linear.weight for linear in linears if isinstance(linear, Linear)))
    codes, scales = _scattered(each.codes for each in float8), _scattered(each.scales for each in float8)
    return ScatteredMatrices(codes, scales, float8[0].group, EXPONENTS[float8[0].kind])


def _biases(linears: Sequence[nn.Module]) -> ScatteredTensors | None:
    biases = [each.bias for each in linears if isinstance(each, Linear | Float8Linear) and each.bias is not None]
    return _scattered(biases) if biases else None


def _scattered(tensors: Iterable[Tensor]) -> ScatteredTensors:
    from megatron_runtime.gpu.experts import ScatteredTensors

    return ScatteredTensors.of(list(tensors))

"""Mixtures of experts without a wait of the host: the networks of all experts, for all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_runtime.gpu.expert_kernels import narrow_visits, sort_visits, sum_visits, widen_visits
from megatron_runtime.gpu.float8 import FIRST_NATIVE, elements_at_once
from megatron_runtime.gpu.launch import capability, launch, power_of_two
from megatron_runtime.gpu.rows import ACTIVATIONS

ALIGNMENT = 16
"""Bytes of which the address of a matrix has to be a multiple."""
TILE_ROWS = (16, 64, 128)
"""Visits in a tile."""
FIXED_TILE_ROWS = 64
"""Where the bits of a token must not depend on the number of tokens: as many as the tensor cores of Hopper multiply at
once, so that single tokens take little longer and prompts are not slow."""
MOST_MEAN_VISITS = {16: 8, 64: 128}
"""Mean visits of an expert up to which tiles are so small. An expert with fewer visits than a tile has rows is read
once."""
JOINED_TOKENS = TILE_ROWS[0]
"""Most tokens for which the shared expert is one of the experts: a tile, so that its matrices are read once."""
SORT_BLOCK = 1024
LONG_SORT_BLOCK = 4096
"""Visits that a program of `sort_visits` sees at once."""
SUM_BLOCK = 1024


@dataclass(frozen=True)
class ProductSizes:
    """Sizes of a product's tiles on one generation of GPUs; the tests compile with them and count registers."""

    rows: int
    """Visits."""
    columns: int
    """Rows of the matrix. With gates, two belong to a channel."""
    inner: int
    """Elements that are added at once."""
    warps: int
    stages: int


def product_sizes(capability: int, rows: int, element_bytes: int, *, is_float8: bool = False) -> ProductSizes:
    """For `widen_visits` and `narrow_visits`, by compute capability and by one of TILE_ROWS, and whether the matrices
    are in fp8.

    Chosen so that nothing spills to local memory; how fast they are is unknown.
    """
    if element_bytes == 4:
        return ProductSizes(rows=16 if rows == 16 else 32, columns=32, inner=32, warps=4, stages=2)
    if rows == 16:
        return ProductSizes(rows=16, columns=64, inner=128, warps=4, stages=4 if capability >= 90 else 3)
    if rows == 64:
        return ProductSizes(rows=64, columns=128, inner=64, warps=4, stages=3)
    is_wide = capability == 90 and not is_float8
    return ProductSizes(rows=128, columns=256 if is_wide else 128, inner=64, warps=8, stages=3)


def tile_rows(visits: int, experts: int) -> int:
    """One of TILE_ROWS, by the number of visits of all experts. The bits of a token may depend on the choice."""
    return next((rows for rows, most in MOST_MEAN_VISITS.items() if visits <= most * experts), TILE_ROWS[-1])


@dataclass(frozen=True)
class ScatteredTensors:
    """Contiguous tensors of equal shapes and types, anywhere in the memory of a device."""

    first: Tensor
    offsets: Tensor
    """int64 [tensors]: the place of each, in elements from the first."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> ScatteredTensors:
        """They have to stay where they are. Their addresses are multiples of ALIGNMENT."""
        addresses = [each.data_ptr() for each in tensors]
        offsets = [(each - addresses[0]) // tensors[0].element_size() for each in addresses]
        return cls(tensors[0], torch.tensor(offsets, dtype=torch.int64, device=tensors[0].device))


@dataclass(frozen=True)
class ScatteredMatrices:
    """The matrices of experts."""

    tensors: ScatteredTensors
    """In fp8 the codes, uint8."""
    scales: ScatteredTensors | None = None
    """Of matrices in fp8, as in `float8.Float8Weights`."""
    group: int = 0
    exponent: int = 0

    def sizes(self, inputs: Tensor, rows: int) -> tuple[ProductSizes, dict[str, int | bool]]:
        """Those of a product with tiles of ``rows`` rows, and the constants of the scales."""
        arch, is_float8 = capability(inputs), self.scales is not None
        sizes = product_sizes(arch, rows, inputs.element_size(), is_float8=is_float8)
        if is_float8:
            sizes = replace(sizes, inner=elements_at_once(sizes.inner, self.group, inputs.shape[1]))
        scales = {"GROUP": self.group, "EXPONENT": self.exponent, "IS_NATIVE": is_float8 and arch >= FIRST_NATIVE}
        return sizes, scales

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Of both kernels of products."""
        scales = self.scales or self.tensors
        return self.tensors.first, self.tensors.offsets, scales.first, scales.offsets


@dataclass(frozen=True)
class ExpertNetworks:
    """Feed-forward networks of equal shapes."""

    gate_up: ScatteredMatrices
    """[channels, hidden]; with gates [2 * channels, hidden], gates first."""
    down: ScatteredMatrices
    """[hidden, channels]."""
    gate_up_biases: ScatteredTensors | None
    down_biases: ScatteredTensors | None
    is_gated: bool
    activation: str
    """One of ACTIVATIONS."""
    clamped: tuple[float, float] | None
    """Alpha and limit of `ClampedGate`, which replaces the activation."""

    def __len__(self) -> int:
        return len(self.gate_up.tensors.offsets)

    @property
    def channels(self) -> int:
        """Between the products."""
        return self.down.tensors.first.shape[1]


Shared = tuple[Tensor, Tensor | None]
"""Of the shared expert: the result [T, size], and the logit of its sigmoid gate [T, 1], if it has one."""


def process(
    hidden: Tensor,
    routing: tuple[Tensor, Tensor],
    networks: ExpertNetworks,
    first: int,
    rows: int,
    *,
    weights_inputs: bool = False,
    shared: Shared | None = None,
) -> Tensor:
    """The weighted sum of the results of each token's chosen experts: [T, size] to [T, size].

    Three launches for a single token, and four for several. An expert that is elsewhere adds nothing.

    Args:
        hidden: The tokens.
        routing: Weights, float32, and chosen experts, int64, both [T, per_token].
        networks: The experts that are here.
        first: The number of the first of them.
        rows: One of TILE_ROWS.
        weights_inputs: Whether the weights multiply the inputs instead of the results.
        shared: That of the shared expert, which is added.
    """
    hidden, weights, chosen = (each.contiguous() for each in (hidden, *routing))
    per_token, size = chosen.shape[1], hidden.shape[1]
    visits = _sorted(chosen, first, len(networks))
    inputs, visits_per_row = hidden, per_token
    if weights_inputs:
        inputs, visits_per_row = (hidden[:, None] * weights.to(hidden.dtype)[..., None]).view(-1, size), 1
    widened = _widened(inputs, visits_per_row, visits, networks, rows)
    results = _narrowed(widened, size, visits, networks, rows)
    summed = torch.empty_like(hidden)
    added, gates = shared or (hidden, None)
    launch(
        sum_visits,
        (len(hidden), -(-size // SUM_BLOCK)),
        (summed, results, weights, chosen, added.contiguous(), hidden if gates is None else gates.contiguous(), first),
        COUNT=len(networks),
        PER_TOKEN=per_token,
        SIZE=size,
        BLOCK=min(power_of_two(size), SUM_BLOCK),
        WEIGHTED=not weights_inputs,
        SHARED=shared is not None,
        GATED=gates is not None,
    )
    return summed


def use_kernels(
    hidden: Tensor,
    routing: tuple[Tensor, Tensor],
    networks: ExpertNetworks,
    first: int,
    *,
    weights_inputs: bool,
    gates_shared: bool | None,
    tiles: Sequence[int] = TILE_ROWS,
) -> None:
    """Launch `process` on a single token, with its routing, for all of ``tiles`` and numbers of tokens.

    ``gates_shared``: whether the shared expert has a gate; None: none is added.
    """
    weights, chosen = routing
    for tokens, tile_rows in ((1, {TILE_ROWS[0], FIXED_TILE_ROWS}), (2, set(TILE_ROWS))):
        for rows in tile_rows.intersection(tiles):
            inputs, routed = hidden.repeat(tokens, 1), (weights.repeat(tokens, 1), chosen.repeat(tokens, 1))
            shared = None if gates_shared is None else (inputs, inputs[:, :1] if gates_shared else None)
            process(inputs, routed, networks, first, rows, weights_inputs=weights_inputs, shared=shared)
    _sorted(chosen.repeat(SORT_BLOCK + 1, 1), first, len(networks))


@dataclass(frozen=True)
class _Visits:
    """Those of all tokens by expert, as in `sort_visits`."""

    chosen: Tensor
    order: Tensor
    """Not computed for a single token, whose visits have different experts; and neither are the starts."""
    starts: Tensor
    first: int

    @property
    def is_single(self) -> bool:
        """Whether there is one token."""
        return len(self.chosen) == 1

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Of both kernels of products."""
        return self.chosen, self.order, self.starts, self.first


def _sorted(chosen: Tensor, first: int, count: int) -> _Visits:
    visits = chosen.numel()
    order = torch.empty(visits, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=chosen.device)
    found = _Visits(chosen, order, starts, first)
    if not found.is_single:
        block, warps = (SORT_BLOCK, 4) if visits <= SORT_BLOCK else (LONG_SORT_BLOCK, 8)
        launch(sort_visits, (count,), (order, starts, chosen, visits, first), BLOCK=block, num_warps=warps)
    return found


def _widened(inputs: Tensor, visits_per_row: int, visits: _Visits, networks: ExpertNetworks, rows: int) -> Tensor:
    """[visits, channels], by expert."""
    sizes, scales = networks.gate_up.sizes(inputs, rows)
    output = inputs.new_empty(len(visits.order), networks.channels)
    columns = networks.channels * (2 if networks.is_gated else 1)
    alpha, limit = networks.clamped or (0.0, 0.0)
    biases = networks.gate_up_biases or networks.gate_up.tensors
    launch(
        widen_visits,
        (-(-columns // sizes.columns), _tiles(visits, len(networks), sizes)),
        (
            *(output, inputs, *visits.arguments, *networks.gate_up.arguments, biases.first, biases.offsets),
            *(float(alpha), float(limit)),
        ),
        PER_TOKEN=visits_per_row,
        SIZE=inputs.shape[1],
        CHANNELS=networks.channels,
        GATED=networks.is_gated,
        BIASED=networks.gate_up_biases is not None,
        ACTIVATION=ACTIVATIONS[networks.activation],
        CLAMPED=networks.clamped is not None,
        **scales,
        **_constants(visits, len(networks), sizes),
    )
    return output


def _narrowed(inputs: Tensor, size: int, visits: _Visits, networks: ExpertNetworks, rows: int) -> Tensor:
    """[visits, size], by token."""
    sizes, scales = networks.down.sizes(inputs, rows)
    output = inputs.new_empty(len(visits.order), size)
    biases = networks.down_biases or networks.down.tensors
    launch(
        narrow_visits,
        (-(-size // sizes.columns), _tiles(visits, len(networks), sizes)),
        (output, inputs, *visits.arguments, *networks.down.arguments, biases.first, biases.offsets),
        SIZE=networks.channels,
        CHANNELS=size,
        BIASED=networks.down_biases is not None,
        **scales,
        **_constants(visits, len(networks), sizes),
    )
    return output


def _tiles(visits: _Visits, count: int, sizes: ProductSizes) -> int:
    """The most tiles that may be needed: each expert has at most one that its visits do not fill."""
    total = len(visits.order)
    return total if visits.is_single else min(total, total // sizes.rows + count)


def _constants(visits: _Visits, count: int, sizes: ProductSizes) -> dict[str, int | bool]:
    tile = {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.columns, "BLOCK_K": sizes.inner}
    experts = {"COUNT": count, "COUNT_PAD": power_of_two(count), "SINGLE": visits.is_single}
    return tile | experts | {"num_warps": sizes.warps, "num_stages": sizes.stages}

"""Random mixtures of experts with matrices in fp8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpu_support.mixture import MixtureCase
from torch import Tensor
from torch.nn import functional

from megatron_runtime.gpu import experts, float8

KIND = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8Mixture:
    """A mixture, whose matrices are exactly those that the codes mean."""

    case: MixtureCase
    codes: tuple[list[Tensor], list[Tensor]]
    """uint8, of both products."""
    scales: tuple[list[Tensor], list[Tensor]]
    """float32 [groups, out]."""
    group: int | None
    """Columns that have one scale; None: all."""

    @classmethod
    def of(cls, case: MixtureCase, group: int | None) -> Float8Mixture:
        """The mixture, rounded."""
        made = [[_quantized(each, group or each.shape[1]) for each in part] for part in case.matrices]
        codes, scales, means = (tuple([each[at] for each in part] for part in made) for at in range(3))
        return cls(replace(case, matrices=means), codes, scales, group)

    def on(self, device: torch.device) -> Float8Mixture:
        """A copy on this device, without the plain matrices."""
        codes, scales = (
            tuple([each.to(device) for each in part] for part in both) for both in (self.codes, self.scales)
        )
        case = replace(self.case, matrices=([], [])).on(device)
        return replace(self, case=case, codes=codes, scales=scales)

    def rows(self, start: int, stop: int) -> Float8Mixture:
        """Some of the tokens."""
        return replace(self, case=self.case.rows(start, stop))

    def process(self, tile_rows: int) -> Tensor:
        """By the kernels."""
        case, scattered = self.case, experts.ScatteredTensors.of
        matrices = [
            experts.ScatteredMatrices(
                scattered(codes), scattered(scales), self.group or codes[0].shape[1], float8.EXPONENTS[KIND]
            )
            for codes, scales in zip(self.codes, self.scales, strict=True)
        ]
        networks = experts.ExpertNetworks(
            *matrices,
            *((None, None) if case.biases is None else map(scattered, case.biases)),
            is_gated=case.is_gated,
            activation=case.activation,
            clamped=case.clamped,
        )
        return experts.process(case.hidden, (case.weights, case.chosen), networks, case.first, tile_rows)


def _quantized(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the float64 matrix that they mean."""
    rows, columns = matrix.shape
    padded = functional.pad(matrix.float(), (0, -columns % group)).view(rows, -1, group)
    scales = padded.abs().amax(-1) / torch.finfo(KIND).max
    codes = (padded / scales[..., None]).flatten(1)[:, :columns].to(KIND)
    means = codes.double() * scales.double().repeat_interleave(group, 1)[:, :columns]
    return codes.view(torch.uint8), scales.t().contiguous(), means

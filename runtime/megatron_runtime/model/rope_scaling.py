"""The scaling of rotary frequencies. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.errors import CheckpointError


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of the rotary frequencies for lengths beyond those of the first training."""

    kind: str = "default"
    """``default`` (none), ``linear`` (all divided by the factor), ``llama3`` and ``yarn`` (only low frequencies) or
    ``longrope`` (a separate factor for each).
    """
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    """llama3 and yarn: a frequency with at most this many rotations over the original length is low."""
    high_frequency_factor: float = 1.0
    """llama3 and yarn: a frequency with at least this many rotations over the original length is high, and is not
    scaled.
    """
    original_max_position_embeddings: int = 0
    whole_channels: bool = True
    """yarn: whether the limits of low and high frequencies are rounded to whole channels."""
    short_factors: tuple[float, ...] = ()
    """longrope: the divisor of each frequency in a model that is served at up to its original length."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same in a model that is served beyond its original length."""
    magnitude: float = 1.0
    """Factor of the rotated queries and keys."""

    def check(self, source: str, theta: float, frequencies: int) -> None:
        """Raise CheckpointError naming ``source`` when the numbers are inconsistent with the rotary base ``theta`` and
        the number of frequencies.
        """
        if self.kind == "yarn":
            if theta <= 1.0:
                raise CheckpointError(f"{source}: yarn with a rope theta of {theta}, expected one above 1")
            turns = (self.low_frequency_factor, self.high_frequency_factor)
            if min(*turns, self.factor, self.original_max_position_embeddings) <= 0:
                raise CheckpointError(f"{source}: the numbers of yarn are {self}, expected them to be above 0")
        for factors in (self.short_factors, self.long_factors):
            if self.kind == "longrope" and len(factors) != frequencies:
                raise CheckpointError(
                    f"{source}: longrope has {len(factors)} factors for {frequencies} rotary frequencies"
                )

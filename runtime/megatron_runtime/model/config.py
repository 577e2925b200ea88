"""The shape of a decoder, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_runtime.errors import CheckpointError

KNOWN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""The names that both Hugging Face (``model_type``) and GGUF (``general.architecture``) use for what we build."""

_LARGEST_SIZE = 2**27
"""Beyond any model; what is larger is damage, and would overflow the size of a tensor."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the lengths that the model was first trained on."""

    kind: str = "default"
    """``default`` (none), ``linear`` (all frequencies divided by factor) or ``llama3`` (only the slow ones)."""
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Llama family. Sizes count elements, lengths count tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    """RMS norm over each head of the queries and keys before the rotation (Qwen3)."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer, how many of the latest tokens it attends to; None means all. Empty: no layer has a window."""

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """How many of the latest tokens ``layer`` attends to, itself included; None means all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def check(self, source: str) -> None:
        """Raise CheckpointError naming ``source`` when the numbers don't fit together."""
        sizes = {
            "vocab size": self.vocab_size,
            "hidden size": self.hidden_size,
            "intermediate size": self.intermediate_size,
            "number of layers": self.num_layers,
            "number of attention heads": self.num_attention_heads,
            "number of key/value heads": self.num_kv_heads,
            "head dimension": self.head_dim,
            "number of attention heads times head dimension": self.num_attention_heads * self.head_dim,
            "maximum sequence length": self.max_position_embeddings,
        }
        for name, value in sizes.items():
            if not 1 <= value <= _LARGEST_SIZE:
                raise CheckpointError(f"{source}: {name} is {value:,}, expected 1 to {_LARGEST_SIZE:,}")
        if self.num_attention_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{source}: {self.num_attention_heads} attention heads can't share {self.num_kv_heads} key/value "
                "heads evenly; expected a divisor"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"{source}: head dimension is {self.head_dim}, expected an even number")


def refuse_architecture(source: str, found: object) -> CheckpointError:
    """The error for a checkpoint of a model family that isn't built here."""
    known = ", ".join(KNOWN_ARCHITECTURES)
    return CheckpointError(
        f"{source}: architecture {found!r} is not known; the known ones are {known}. "
        "Choose a checkpoint of one of these families"
    )

"""The configuration of a decoder, independent of the file format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.recurrent_config import RecurrentConfig
from megatron_runtime.model.rope_scaling import RopeScaling

NormKind = Literal["rms", "rms_plus_one", "rms_in_float32", "layer", "layer_without_bias"]
"""``rms``; ``rms_plus_one``, whose stored weights are one less; ``rms_in_float32``, rounded after the multiplication
with the weights; ``layer``: mean and variance, with a bias or none.
"""
NormPlacement = Literal["before", "after", "around"]
"""Where attention and feed-forward are normalized: their input, their output, or both."""
QueryKeyNorm = Literal["none", "head", "each_head", "projection", "unweighted"]
"""Whether queries and keys are normalized before the rotation: per head, with weights for each head, or over all heads;
``unweighted``: per head without weights, in the layers with a rotation.
"""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu_squared"]
LayerKind = Literal["attention", "recurrence", "feed_forward"]
"""What a layer begins with: ``feed_forward`` if it has neither attention nor a recurrence."""
RoutingScores = Literal["softmax", "sigmoid"]
"""The score of an expert: a softmax over all experts, or the sigmoid of its own logit."""
GroupScores = Literal["max", "top_2_sum"]
"""The score of a group of experts: the highest score in it, or the sum of the two highest."""

_LARGEST_SIZE = 2**27
"""An upper limit for sizes. Larger values mean a damaged file, and would overflow the size of a tensor."""
_MOST_LAYERS = 2**20


@dataclass(frozen=True)
class QueryTemperature:
    """A factor of the queries that grows with the position: ``1 + strength * log(1 + floor((p + offset) / interval))``
    for position p (Nakanishi, Scalable-Softmax).
    """

    strength: float
    interval: int
    offset: int = 0
    only_unrotated: bool = False
    """Whether only the layers without rotation have it."""


@dataclass(frozen=True)
class ClampedGate:
    """Feed-forward with ``gate * sigmoid(alpha * gate) * (up + 1)``, of a gate up to ``limit`` and an ``up`` between
    minus and plus ``limit`` (OpenAI, gpt-oss).
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class RoutingConfig:
    """How a router selects the experts of a token, and how it weights them."""

    scores: RoutingScores = "softmax"
    """The function from logits to scores."""
    normalize_weights: bool = False
    """Whether the weights of the selected experts are normalized to a sum of one."""
    weight_multiplier: float = 1.0
    """Factor of the weights after that."""
    has_selection_bias: bool = False
    """Whether each expert has a bias that is added to its score for the selection, but not for its weight."""
    groups: int = 1
    """Groups of consecutive experts; the experts of a token are in its ``groups_per_token`` best groups."""
    groups_per_token: int = 1
    group_scores: GroupScores = "max"
    weights_inputs: bool = False
    """Whether the weights multiply the inputs of the experts instead of the outputs."""
    has_bias: bool = False
    """Whether logits have a bias."""
    in_float32: bool = False
    """Whether logits are computed in float32 for every dtype of the model."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture-of-experts layer, in which each token uses a few of many feed-forward networks."""

    count: int
    per_token: int
    intermediate_size: int
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    dense_layers: frozenset[int] = frozenset()
    """The layers with one ordinary feed-forward network instead."""
    shared_intermediate_size: int = 0
    """Size of the shared expert, which processes every token; 0: there is none."""
    has_shared_expert_gate: bool = False
    """Whether the output of the shared expert is multiplied by the sigmoid of a projection of its input."""

    def check(self, source: str) -> None:
        """Raise CheckpointError naming ``source`` when the numbers are inconsistent."""
        if not 1 <= self.per_token <= self.count:
            raise CheckpointError(
                f"{source}: number of experts per token is {self.per_token}, expected 1 to {self.count}"
            )
        routing = self.routing
        if routing.groups == 1:
            return
        smallest = 2 if routing.group_scores == "top_2_sum" else 1
        if routing.groups < 1 or self.count % routing.groups or self.count // routing.groups < smallest:
            raise CheckpointError(
                f"{source}: number of expert groups is {routing.groups}, expected a divisor of {self.count} experts "
                f"that leaves at least {smallest} in each group"
            )
        fewest = -(-self.per_token * routing.groups // self.count)
        if not fewest <= routing.groups_per_token <= routing.groups:
            raise CheckpointError(
                f"{source}: number of expert groups per token is {routing.groups_per_token}, expected {fewest} to "
                f"{routing.groups} for {self.per_token} experts per token"
            )


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-AI, DeepSeek-V2): the keys and values of all heads come from one latent.

    The first ``qk_nope_head_dim`` channels of a query or key are not rotated; the other ``qk_rope_head_dim`` are, and
    those of the key are the same for all heads. ``ModelConfig.head_dim`` is the sum of both.
    """

    kv_lora_rank: int
    """Channels of the latent from which each token's keys and values are projected."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    """Channels of a value."""
    q_lora_rank: int | None = None
    """Channels of the latent from which queries are projected; None: they are projected from the hidden state."""
    rope_interleave: bool = True
    """Whether adjacent channels are rotated together, instead of channels of the first and the second half."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of the latents."""

    @property
    def sizes(self) -> dict[str, int]:
        """Fields that have to be positive, by name."""
        named = {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
        }
        return named if self.q_lora_rank is None else named | {"q_lora_rank": self.q_lora_rank}


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder. Sizes count elements, lengths count tokens. Defaults are those of Llama."""

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
    """Epsilon of both kinds of norms."""
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: QueryKeyNorm = "none"
    layer_windows: tuple[int | None, ...] = ()
    """Attention window of each layer in tokens; None means no limit. Empty: no layer has a window."""
    chunked_windows: bool = False
    """Whether a window is a chunk of the sequence: a token attends to the tokens of its own chunk, up to itself."""
    attention_sinks: bool = False
    """Whether each query head has a learned score that takes part in the softmax, without a value (Xiao et al.)."""
    query_temperature: QueryTemperature | None = None
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    parallel_feed_forward: bool = False
    """Whether the feed-forward network has the same input as attention, and no norm of its own (GPT-J)."""
    activation: Activation = "silu"
    clamped_gate: ClampedGate | None = None
    """Replaces the activation."""
    gated_feed_forward: bool = True
    experts: ExpertsConfig | None = None
    latent_attention: LatentAttentionConfig | None = None
    """None: grouped-query attention."""
    recurrent: RecurrentConfig | None = None
    """None: no layer has a recurrence in place of attention."""
    feed_forward_layers: frozenset[int] | None = None
    """The layers with a feed-forward network alone; the others have attention or a recurrence alone. None: each layer
    has a feed-forward network after its attention or recurrence.
    """
    attention_output_gate: bool = False
    """Whether the output of each head is multiplied by the sigmoid of a projection of its own."""
    rotary_dim: int | None = None
    """Number of leading channels of each head that are rotated; None means all."""
    rope_interleave: bool = False
    """Whether adjacent channels are rotated together, instead of channels of the first and the second half."""
    local_rope_theta: float | None = None
    """The rotary base, without scaling, of the layers with a window; None: that of the other layers."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotation of queries and keys."""
    learned_positions: int = 0
    """Rows of the table of learned positions that is added to the embedding; 0: there is none."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: one over the square root of the head dimension."""
    query_key_value_clip: float | None = None
    """Queries, keys and values are clipped to plus and minus this, before the rotation."""
    attention_soft_cap: float | None = None
    """Attention scores are limited smoothly to plus or minus this."""
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of the results of attention and feed-forward before they are added to the residual path."""
    logit_divisor: float = 1.0
    prediction_layers: int = 0
    """Layers after the last one that predict further tokens. Checkpoints may contain them; the decoder ignores them."""

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """Number of latest tokens, including itself, that a token attends to in ``layer``; None means all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def kind(self, layer: int) -> LayerKind:
        """What ``layer`` begins with."""
        if self.recurrence_of(layer) is not None:
            return "recurrence"
        return "feed_forward" if layer in (self.feed_forward_layers or ()) else "attention"

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return sum(self.kind(layer) == "attention" for layer in range(self.num_layers))

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of ``layer``; None for an ordinary feed-forward network."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def recurrence_of(self, layer: int) -> RecurrentConfig | None:
        """The recurrence of ``layer``; None for attention."""
        return None if self.recurrent is None or layer not in self.recurrent.layers else self.recurrent

    def check(self, source: str) -> None:
        """Raise CheckpointError naming ``source`` when the numbers are inconsistent."""
        latent_sizes = {} if self.latent_attention is None else self.latent_attention.sizes
        sizes = latent_sizes | {
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
        if self.experts is not None:
            sizes["number of experts"] = self.experts.count
            sizes["intermediate size of an expert"] = self.experts.intermediate_size
            if self.experts.shared_intermediate_size:
                sizes["intermediate size of the shared expert"] = self.experts.shared_intermediate_size
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
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise CheckpointError(
                f"{source}: the windows of {len(self.layer_windows)} layers are given, expected {self.num_layers}"
            )
        if (smallest := min((window for window in self.layer_windows if window is not None), default=1)) < 1:
            raise CheckpointError(f"{source}: attention window is {smallest}, expected 1 or more tokens")
        if self.query_temperature is not None and self.query_temperature.interval < 1:
            raise CheckpointError(
                f"{source}: interval of the query temperature is {self.query_temperature.interval}, expected 1 or more "
                "tokens"
            )
        if not 0 <= self.prediction_layers <= self.num_layers:
            raise CheckpointError(
                f"{source}: number of prediction layers is {self.prediction_layers:,}, expected 0 to {self.num_layers}"
            )
        if self.experts is not None:
            self.experts.check(source)
        self._check_layers(source)

    def _check_layers(self, source: str) -> None:
        if self.recurrent is not None:
            self.recurrent.check(source, self.num_layers)
        if not self.attention_layers:
            raise CheckpointError(f"{source}: none of {self.num_layers} layers has attention, expected one or more")
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if turned % 2 or not 2 <= turned <= self.head_dim:
            raise CheckpointError(
                f"{source}: {turned} channels of a head are rotated, expected an even number up to {self.head_dim}"
            )
        self.rope_scaling.check(source, self.rope_theta, turned // 2)


def alternating_windows(window: int, pattern: int, layers: int) -> tuple[int | None, ...]:
    """``window`` in all layers but every ``pattern``-th."""
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))


def layers_without_window(windows: Iterable[int | None]) -> frozenset[int]:
    """The numbers of the layers without one."""
    return frozenset(layer for layer, window in enumerate(windows) if window is None)


def check_num_layers(source: str, count: int) -> int:
    """``count`` if a model can have this number of layers; else raises CheckpointError, before any allocation."""
    if not 1 <= count <= _MOST_LAYERS:
        raise CheckpointError(f"{source}: number of layers is {count:,}, expected 1 to {_MOST_LAYERS:,}")
    return count


def refuse_architecture(source: str, found: object, known: Iterable[str]) -> CheckpointError:
    """The error for a checkpoint of an unsupported model family."""
    return CheckpointError(
        f"{source}: architecture {found!r} is not known; the known ones are {', '.join(known)}. "
        "Choose a checkpoint of one of these families"
    )

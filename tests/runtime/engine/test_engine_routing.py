"""Mixtures of experts: the experts of each token are reported, and those of another pass are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from torch import Tensor

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

EXPERTS, PER_TOKEN, LAYERS, BLOCK = 4, 2, 2, 4
PROMPT = [7, 3, 90, 4, 5, 201, 12, 40, 41, 9]
GREEDY: dict[str, Any] = {"temperature": 0, "num_tokens_to_generate": 8, "ignore_eos": True, "return_log_probs": True}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("experts") / "tiny", experts=EXPERTS)
    return load_model(folder, dtype="float32"), load_tokenizer(folder)


@pytest.fixture
def make(parts: tuple[Decoder, Tokenizer]) -> Callable[..., DynamicInferenceEngine]:
    def engine(blocks: int = 32, **settings: Any) -> DynamicInferenceEngine:
        size = KVCache.block_bytes(parts[0].config, BLOCK, torch.float32)
        values = {"block_size_tokens": BLOCK, "kv_cache_memory_bytes": blocks * size, "moe_enable_routing_replay": True}
        return DynamicInferenceEngine.build(*parts, InferenceConfig(**{**values, **settings}))

    return engine


def served(engine: DynamicInferenceEngine, **changes: Any) -> DynamicInferenceRequest:
    return engine.generate([PROMPT], SamplingParams(**{**GREEDY, **changes}))[0].merge()


def routing_of(request: DynamicInferenceRequest) -> Tensor:
    assert request.routing_indices is not None
    return request.routing_indices


def of_one_pass(model: Decoder, tokens: list[int]) -> Tensor:
    """The routing of one pass over all tokens."""
    count = len(tokens)
    tape = RoutingTape()
    batch = ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=torch.arange(count),
        slots=torch.arange(count),
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lengths=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logit_rows=torch.arange(count),
    )
    model(batch, KVCache(model.config, 1, count, torch.float32), tape)
    return tape.chosen()


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens": 3}, {"enable_prefix_caching": True}, {"track_paused_request_events": True, "blocks": 7}],
    ids=["whole", "chunked", "cached", "evicted"],
)
def test_the_routing_is_that_of_one_pass_over_all_tokens(
    make: Callable[..., DynamicInferenceEngine], parts: tuple[Decoder, Tokenizer], settings: dict[str, Any]
) -> None:
    engine = make(**settings)
    results = [record.merge() for record in engine.generate([PROMPT] * 2, SamplingParams(**GREEDY))]
    results.append(served(engine, skip_prompt_log_probs=True))
    if "blocks" in settings:
        assert engine.stats().evictions_total > 0
    if "enable_prefix_caching" in settings:
        assert results[-1].num_cached_tokens == 2 * BLOCK
    for result in results:
        tokens = [*PROMPT, *result.generated_tokens]
        assert routing_of(result).tolist() == of_one_pass(parts[0], tokens[:-1]).tolist()


def test_a_stop_text_leaves_the_routing_of_the_visible_tokens(make: Callable[..., DynamicInferenceEngine]) -> None:
    whole = served(make(), ignore_eos=True)
    assert whole.generated_text is not None
    text = whole.generated_text[3:5]
    stopped = served(make(), stop_words=[text])
    assert len(stopped.generated_tokens) < 8
    assert routing_of(stopped).shape == (len(PROMPT) + len(stopped.generated_tokens) - 1, LAYERS, PER_TOKEN)


def test_replaying_the_same_routing_changes_nothing(make: Callable[..., DynamicInferenceEngine]) -> None:
    first = served(make())
    again = served(make(max_tokens=4), replayed_routing=routing_of(first).tolist())
    assert again.generated_tokens == first.generated_tokens
    assert again.generated_log_probs == first.generated_log_probs
    assert again.prompt_log_probs == first.prompt_log_probs


def test_another_routing_is_replayed_for_its_tokens_alone(make: Callable[..., DynamicInferenceEngine]) -> None:
    engine = make(enable_prefix_caching=True)
    first = served(engine)
    other = (routing_of(first)[: len(PROMPT)] + 1) % EXPERTS
    assert served(engine, skip_prompt_log_probs=True).num_cached_tokens == 2 * BLOCK
    unscored = served(engine, replayed_routing=other.tolist(), skip_prompt_log_probs=True)
    assert unscored.num_cached_tokens == 0, "keys and values of another routing were used"
    changed = served(engine, replayed_routing=other.tolist())
    assert routing_of(changed)[: len(PROMPT)].tolist() == other.tolist()
    assert changed.prompt_log_probs != first.prompt_log_probs
    after = served(engine, skip_prompt_log_probs=True)
    assert after.num_cached_tokens == 2 * BLOCK
    assert after.generated_tokens == first.generated_tokens


def test_an_engine_that_records_nothing_can_replay(make: Callable[..., DynamicInferenceEngine]) -> None:
    first = served(make())
    engine = make(moe_enable_routing_replay=False)
    assert served(engine).routing_indices is None
    other = (routing_of(first) + 1) % EXPERTS
    assert served(engine, replayed_routing=other.tolist()).prompt_log_probs != first.prompt_log_probs


def test_the_routing_survives_the_wire(make: Callable[..., DynamicInferenceEngine]) -> None:
    result = served(make())
    back = DynamicInferenceRequest.deserialize(msgpack.unpackb(msgpack.packb(result.serialize())))
    assert torch.equal(routing_of(back), routing_of(result))


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ([[[0, 1]]], r"shape \[1, 1, 2\], expected \[tokens, 2 layers, 2 experts\]"),
        ([[[0, 1], [0, 9]]], "9 is not an expert; the model has 0 to 3"),
        ([[[0, 1], [2, 2]]], "an expert twice"),
        ("experts", "replayed_routing"),
    ],
)
def test_a_routing_that_does_not_fit_is_refused(
    make: Callable[..., DynamicInferenceEngine], routing: Any, words: str
) -> None:
    result = served(make(), replayed_routing=routing)
    assert result.failed()
    with pytest.raises(Exception, match=words):
        raise result.error or AssertionError


def test_a_dense_model_has_no_routing(tiny_model: Decoder, byte_tokenizer: Tokenizer) -> None:
    config = InferenceConfig(kv_cache_memory_bytes=2**20, moe_enable_routing_replay=True)
    with pytest.raises(ConfigurationError, match="the model has no experts"):
        DynamicInferenceEngine.build(tiny_model, byte_tokenizer, config)

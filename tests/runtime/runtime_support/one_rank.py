"""The answer of one rank in this process, which replica groups of several ranks must repeat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams


def answer_of_one_rank(checkpoint: Path, prompt: Sequence[int], length: int) -> str:
    """Greedy text of ``length`` tokens in float32, past the end token."""
    model = load_model(checkpoint, dtype="float32")
    engine = DynamicInferenceEngine.build(model, load_tokenizer(checkpoint), InferenceConfig(buffer_size_gb=0.01))
    params = SamplingParams(temperature=0, num_tokens_to_generate=length, ignore_eos=True)
    return str(engine.generate([list(prompt)], params)[0].merge().generated_text)

"""The reference: Hugging Face transformers with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Twenty varied prompts."""
    return (DATA / "prompts.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="session")
def reference_model(smollm2_path: Path) -> LlamaForCausalLM:
    """SmolLM2 in transformers in float32, with configuration and weights from the GGUF by transformers' reader.

    ``from_pretrained(gguf_file=...)`` does the same but requires accelerate.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(smollm2_path))["config"])
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    weights = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=skeleton)["tensors"]
    model = LlamaForCausalLM(config)
    outcome = model.load_state_dict(weights, strict=False)
    assert outcome.missing_keys == ["lm_head.weight"]
    assert outcome.unexpected_keys == []
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="session")
def reference_tokenizer(smollm2_path: Path) -> PreTrainedTokenizerFast:
    r"""SmolLM2's tokenizer in transformers.

    transformers reads vocabulary, merges and special tokens from the GGUF, but does not support the pre-tokenizer
    ``smollm`` and uses GPT-2's: it splits "a  1" into "a", " ", " 1" where SmolLM2 has "a", "  ", "1". This fixture
    sets that of the published tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct: every digit is separate, then
    GPT-2's pattern. llama.cpp does the same for ``smollm``: it splits at ``\p{N}``, then by that pattern.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


@pytest.fixture(scope="session")
def reference_greedy(reference_model: LlamaForCausalLM) -> Callable[[list[int], int], list[int]]:
    """``reference_greedy(prompt_ids, n)``: the n greedy tokens after the prompt.

    Continues after the end-of-text token; a test that stops there truncates both sides. Answers are cached for the
    session.
    """
    known: dict[tuple[int, ...], list[int]] = {}

    def continue_or_recall(prompt_ids: list[int], num_tokens: int) -> list[int]:
        key = tuple(prompt_ids)
        if len(known.get(key, [])) < num_tokens:
            known[key] = continue_greedily(prompt_ids, num_tokens)
        return known[key][:num_tokens]

    @torch.inference_mode()
    def continue_greedily(prompt_ids: list[int], num_tokens: int) -> list[int]:
        cache, new, made = None, torch.tensor([prompt_ids]), []
        for _ in range(num_tokens):
            output = reference_model(new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            new = output.logits[:, -1:].argmax(-1)
            made.append(int(new))
        return made

    return continue_or_recall

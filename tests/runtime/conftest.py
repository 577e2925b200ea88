"""The reference: Hugging Face transformers with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Twenty varied prompts."""
    return (DATA / "prompts.txt").read_text(encoding="utf-8").splitlines()


@contextmanager
def quick_gguf_package() -> Iterator[None]:
    """The package gguf in a third of the time: its reader makes a million slices, which are slow of numpy's memmap, and
    transformers has it compute all names of tensors anew for each module of a model.
    """
    import gguf

    memmap = np.memmap

    def mapped(*args: Any, **options: Any) -> Any:
        return np.asarray(memmap(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", mapped)
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="session")
def reference_model(smollm2_path: Path) -> LlamaForCausalLM:
    """SmolLM2 in transformers in float32, with configuration and weights from the GGUF by transformers' reader.

    ``from_pretrained(gguf_file=...)`` does the same but requires accelerate.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with quick_gguf_package():
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

    with quick_gguf_package():
        tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer

"""The tokens that end a generation, by their texts: many GGUF files name only the end of a document."""

from __future__ import annotations

from collections.abc import Mapping

END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "[EOS]",
        "<|im_end|>",  # ChatML
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<end_of_turn>",  # Gemma
        "<turn|>",
        "<|tool_response>",
        "<|end|>",  # Phi-3
        "<|return|>",  # Harmony
        "<|call|>",
        "<|flush|>",  # Solar
        "<|calls|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",  # Kimi K2
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)
"""As in llama.cpp, which stops at these tokens in every vocabulary that has them."""

_END_OF_MESSAGE = "<|end|>"
_HARMONY_ENDS = {"<|return|>", "<|call|>"}


def named_ends(vocabulary: Mapping[str, int]) -> list[int]:
    """The ids of the tokens that end a generation by their text, ascending.

    In Harmony's vocabulary ``<|end|>`` ends a message, such as the reasoning, and the generation continues.
    """
    found = END_TEXTS & vocabulary.keys()
    if found >= _HARMONY_ENDS:
        found -= {_END_OF_MESSAGE}
    return sorted(vocabulary[text] for text in found)

"""The tokens that end a generation, by their texts: many GGUF files name only the end of a document."""

from __future__ import annotations

from collections.abc import Collection, Mapping

END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "</s>",  # SentencePiece
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

_IN_MARKUP = {"</s>"}
"""Texts that are also part of HTML: such a token ends a generation only if the vocabulary says that it is special."""
_END_OF_MESSAGE = "<|end|>"
_HARMONY_ENDS = {"<|return|>", "<|call|>"}


def named_ends(vocabulary: Mapping[str, int], special: Collection[int]) -> list[int]:
    """The ids of the tokens that end a generation by their text, ascending.

    In Harmony's vocabulary ``<|end|>`` ends a message, such as the reasoning, and the generation continues.

    Args:
        vocabulary: The ids of all tokens, by text.
        special: The ids of control tokens, which are no part of a text.
    """
    found = END_TEXTS & vocabulary.keys()
    found -= {text for text in found & _IN_MARKUP if vocabulary[text] not in special}
    if found >= _HARMONY_ENDS:
        found -= {_END_OF_MESSAGE}
    return sorted(vocabulary[text] for text in found)

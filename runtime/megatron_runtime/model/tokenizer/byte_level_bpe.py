"""Byte-level BPE tokenizers, which differ in how they split text before the merges."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_3_5 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of gpt-4o, gpt-oss and Llama 4."""
_SEED = _QWEN_2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")


@dataclass(frozen=True)
class PreTokenizer:
    """How a family splits text: the equivalent of the pre-tokenizer in its tokenizer.json."""

    pattern: str | None = None
    """The pattern of a piece; None for that of GPT-2."""
    splits_digits: bool = False
    """Whether every digit becomes a separate piece before the pattern is applied."""
    composes: bool = False
    """Whether text is normalized to NFC first."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole skips the merges."""
    adds_bos: bool = False
    """Whether a document begins with the beginning-of-text token, unless the file says otherwise."""


_GPT_2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA_3, ignores_merges=True, adds_bos=True)
_THREE_DIGITS = PreTokenizer(_LLAMA_3)
_GPT_4O = PreTokenizer(_O200K)
_QWEN = PreTokenizer(_QWEN_2, composes=True)

PRE_TOKENIZERS = {
    "default": _GPT_2,
    "gpt-2": _GPT_2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": PreTokenizer(_QWEN_3_5, composes=True),
    "command-r": PreTokenizer(splits_digits=True, composes=True),
    "dbrx": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "seed-coder": PreTokenizer(_SEED),
    "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
}
"""By their name in GGUF files (``tokenizer.ggml.pre``)."""


def byte_level_bpe(tokens: list[str], merges: list[str], pre: PreTokenizer) -> Backend:
    """A tokenizer of ``tokens`` in order of their ids and ``merges`` in order of their rank, each as ``left right``."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.ignores_merges))
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend

"""SentencePiece BPE tokenizers (Llama 2, Mistral), whose merges follow from the pieces' scores."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

_SPACE = "\u2581"
_UNKNOWN = "<unk>"


def sentencepiece_bpe(tokens: list[str], scores: list[float], prepends_space: bool) -> Backend:
    """A tokenizer of ``tokens`` in order of their ids; a higher score is merged earlier.

    ``prepends_space`` puts a space before the text, as Llama 2 does.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores, vocabulary),
            unk_token=_UNKNOWN if _UNKNOWN in vocabulary else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if prepends_space:
        spaces.insert(0, normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence(spaces)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third: those with the best third first, and among these the earlier tokens
    first.
    """
    ranked: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[token_id]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        ranked += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return ranked

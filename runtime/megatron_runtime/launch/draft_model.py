"""Loads the draft model of ``--speculative-draft-model``."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_runtime.config import SAME_VOCABULARY
from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.launch.options import DRAFT_MODEL_FLAG, EngineOptions

if TYPE_CHECKING:
    import torch

    from megatron_runtime.model.decoder import Decoder
    from megatron_runtime.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_COMPARED = 256
"""Tokens of both vocabularies that are compared; files of one family may differ in unused ones."""


def load_draft_model(
    engine: EngineOptions, tokenizer: Tokenizer, *, device: torch.device, max_sequence_length: int
) -> Decoder | None:
    """The draft model of the options, whole; None without one.

    Raises:
        CheckpointError: It can't be read.
        ConfigurationError: Most of its tokens are not those of ``tokenizer``, that of the served model.
    """
    from megatron_runtime.model.checkpoint import load_model, load_tokenizer

    if engine.speculative_draft_model is None:
        return None
    path = Path(engine.speculative_draft_model)
    with contextlib.suppress(CheckpointError):  # A draft model needs no tokenizer.
        _check_tokens(path, load_tokenizer(path), tokenizer)
    draft = load_model(
        path,
        dtype=engine.dtype,
        quantized_weights=engine.quantized_weights,
        device=device,
        max_sequence_length=max_sequence_length,
        check_finite=engine.check_finite,
        block_size_tokens=engine.block_size_tokens,
    )
    logger.info("Loaded the draft model from %s", path)
    return draft


def _check_tokens(path: Path, ours: Tokenizer, served: Tokenizer) -> None:
    count = min(ours.vocab_size, served.vocab_size)
    tokens = range(0, count, max(count // _COMPARED, 1))
    others = [token for token in tokens if ours.token_bytes(token) != served.token_bytes(token)]
    if 2 * len(others) > len(tokens):
        token = others[0]
        raise ConfigurationError(
            f"{DRAFT_MODEL_FLAG} {path}: its vocabulary is another one than that of the served model: token "
            f"{token} is {ours.token_bytes(token)!r} instead of {served.token_bytes(token)!r}; "
            f"{SAME_VOCABULARY}",
            field="speculative_draft_model",
        )

"""The tokenizer of all frontends that have one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from frontends.protocol import SENTENCE, TOKEN_TEXT

TOKEN = 1
"""The id of ``TOKEN_TEXT``."""
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Writes a byte-level BPE with the words of the prompts, and a chat template; returns the size of the
    vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [SENTENCE] * 2, trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=alphabet)
    )
    assert backend.decode([TOKEN]) == TOKEN_TEXT
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return backend.get_vocab_size()

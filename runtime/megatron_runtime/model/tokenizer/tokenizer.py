"""Tokenization, detokenization, and prompts from chats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from tokenizers import Tokenizer as Backend

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer.chat_template import ChatTemplate, Message
from megatron_runtime.model.tokenizer.detokenizer import IncrementalDetokenizer
from megatron_runtime.model.tokenizer.token_bytes import TokenBytes

_DEFAULT_TEMPLATE = "default"
_TOOLS_TEMPLATE = "tool_use"

_Kept = TypeVar("_Kept")


class Tokenizer:
    """A checkpoint's tokenizer. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        location: str,
        eod: int,
        eos_token_ids: Collection[int] = (),
        bos: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens`` are the texts of special tokens by the names in templates, such as ``bos_token``.

        ``chat_templates`` are sources by name. ``default`` is used, except for requests with tools if there is
        ``tool_use``.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.location = location
        """The file or folder of the tokenizer."""
        self._token_bytes = TokenBytes(backend, location)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._templates = {
            name: ChatTemplate(source, special_tokens or {}) for name, source in (chat_templates or {}).items()
        }
        self.special_token_names = dict(special_tokens or {})
        """Texts of special tokens by their names in templates, such as ``bos_token``."""
        self.eod = eod
        """The token that ends a document, and thereby a generation."""
        self.eos_token_ids = frozenset({eod, *eos_token_ids})
        """Every token that ends a generation."""
        self.bos = bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._kept: dict[str, Any] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    @cached_property
    def longest_token(self) -> int | None:
        """No token is longer than this number of characters; None if unknown text of any length is one token."""
        if not self._token_bytes.is_byte_level and not getattr(self._backend.model, "byte_fallback", False):
            return None
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def definition(self) -> str:
        """The content of an equivalent ``tokenizer.json``."""
        return self._backend.to_str()

    def kept(self, name: str, make: Callable[[], _Kept]) -> _Kept:
        """A cache for objects that are derived from this tokenizer at some cost: computed at the first use of this
        name.
        """
        if name not in self._kept:
            self._kept[name] = make()
        found: _Kept = self._kept[name]
        return found

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens in the text are recognized.

        ``add_special_tokens`` adds the tokens around a document, such as a beginning-of-text token.
        """
        # The only function of the library that does not compute the offsets of tokens.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; invalid bytes become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special: no part of a text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, of a special one those of its text; empty for an id outside the vocabulary."""
        return self._token_bytes[token_id]

    @property
    def drops_first_space(self) -> bool:
        """Whether a text begins without the space that its first token has."""
        return self._token_bytes.drops_first_space

    def incremental(self, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer for a growing sequence. The special tokens ``shown`` are never skipped."""
        special = self._special_ids.difference(shown) if shown else self._special_ids
        skipped = special if skip_special_tokens else ()
        return IncrementalDetokenizer(self._token_bytes, skipped)

    def special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, with their ids."""
        found = {text: self._backend.token_to_id(text) for text in texts}
        return {text: token for text, token in found.items() if token in self._special_ids}

    def chat_template(self, *, has_tools: bool) -> ChatTemplate | None:
        """The template for chats with or without tools; None if there is none."""
        template = self._templates.get(_TOOLS_TEMPLATE if has_tools else _DEFAULT_TEMPLATE)
        return template or self._templates.get(_DEFAULT_TEMPLATE)

    def new_chat_template(self, source: str) -> ChatTemplate:
        """A template from elsewhere, with the special tokens of this tokenizer."""
        return ChatTemplate(source, self.special_token_names)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a chat, by the checkpoint's template.

        Raises InvalidRequestError without a template, or when the template rejects the messages.
        """
        template = self.chat_template(has_tools=bool(tools))
        if template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template. Send a prompt to /v1/completions instead", field="messages"
            )
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself contains every special token."""
        prompt = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return self.tokenize(prompt)

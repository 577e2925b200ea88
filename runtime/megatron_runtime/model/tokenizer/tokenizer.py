"""Text to token ids and back, and chats to prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """A checkpoint's tokenizer; safe to use from several threads."""

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
        """``special_tokens`` are the names that a template may use, such as ``bos_token``, with their text.

        ``chat_templates`` are sources by name; the one called ``default`` is used unless a request brings tools and
        there is one called ``tool_use``.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.location = location
        """The file or folder that it was read from."""
        self._token_bytes = TokenBytes(backend, location)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._templates = {
            name: ChatTemplate(source, special_tokens or {}) for name, source in (chat_templates or {}).items()
        }
        self.special_token_names = dict(special_tokens or {})
        """Texts of special tokens by what templates call them, such as ``bos_token``."""
        self.eod = eod
        """The token that ends a document, and with it a generation."""
        self.eos_token_ids = frozenset({eod, *eos_token_ids})
        """Every token that ends a generation."""
        self.bos = bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._kept: dict[str, Any] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    @property
    def definition(self) -> str:
        """The whole tokenizer as ``tokenizer.json`` would say it."""
        return self._backend.to_str()

    def kept(self, name: str, make: Callable[[], _Kept]) -> _Kept:
        """What others make of this tokenizer at some cost: made when it is first asked for by this name."""
        if name not in self._kept:
            self._kept[name] = make()
        found: _Kept = self._kept[name]
        return found

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens in the text are recognized.

        ``add_special_tokens`` adds what the checkpoint puts around a document, such as a beginning-of-text token.
        """
        # The one way into the library that does not work out where in the text each token begins.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that can't become a character show as U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def incremental(self, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer for one sequence that grows; special tokens that are ``shown`` are never skipped."""
        special = self._special_ids.difference(shown) if shown else self._special_ids
        skipped = special if skip_special_tokens else ()
        return IncrementalDetokenizer(self._token_bytes, skipped)

    def special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, with their ids."""
        found = {text: self._backend.token_to_id(text) for text in texts}
        return {text: token for text, token in found.items() if token in self._special_ids}

    def chat_template(self, *, has_tools: bool) -> ChatTemplate | None:
        """The template for chats with tools or without; None if there is no such template."""
        template = self._templates.get(_TOOLS_TEMPLATE if has_tools else _DEFAULT_TEMPLATE)
        return template or self._templates.get(_DEFAULT_TEMPLATE)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that the checkpoint's template makes of a chat.

        InvalidRequestError when there is no template or the template refuses the messages.
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
        """Token ids of `render_chat`; the template itself writes every special token."""
        prompt = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return self.tokenize(prompt)

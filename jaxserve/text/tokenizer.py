"""The tokenizer of a model: text to ids, ids to text, a conversation to a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.text.chat_template import ChatTemplate, Message
from jaxserve.text.folder import read_folder
from jaxserve.text.gguf_vocabulary import SPECIAL_TOKEN_KEYS, GgufVocabulary, build_backend
from jaxserve.text.pieces import PieceCodec, read_codec

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>")
"""Tokens that end a turn; many a checkpoint names only its end-of-document token as the end of text."""


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes, worked out when first asked for: a start reads no vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer, codec: PieceCodec, added: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._codec = codec
        self._added = added

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        token = self._backend.id_to_token(token_id)
        piece = b"" if token is None else self._codec.encode(token, added=token_id in self._added)
        self[token_id] = piece
        return piece


class Tokenizer:
    """Made by `from_folder` or `from_gguf`, or from a `tokenizers` object and what it does not know."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: the text of named ones (`bos_token`, ...), as chat templates refer to them.

        eos_token_ids: ids that end a text; the token that ends a turn in the default chat template is
        found and joins them. chat_templates: Jinja sources by name, the usual one under `default`.
        Raises ValueError for a decoder that is not supported.
        """
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size()
        """Ids that the tokenizer knows; a model may have more, which stand for no text."""
        bos_token = self.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_token_ids, *self._turn_end_ids()]))
        codec = read_codec(backend.decoder)
        self.strip_start = codec.strip_start
        """Spaces, at most, that are no part of a text when its first token begins with them."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes: Mapping[int, bytes] = _TokenBytes(backend, codec, frozenset(added))
        """The bytes each id stands for, special tokens their own text, unknown ids none."""
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From a model folder in Hugging Face layout.

        Raises ValueError, naming the file, if `tokenizer.json` is missing or a file is malformed.
        """
        found = read_folder(Path(path))
        return cls(
            found.backend,
            special_tokens=found.special_tokens,
            eos_token_ids=found.eos_token_ids,
            chat_templates=found.chat_templates,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the key-value fields of a GGUF file, as plain Python values.

        Raises ValueError, naming the field, for a vocabulary that is incomplete or of an unsupported kind.
        """
        vocabulary = GgufVocabulary(metadata)
        named = {name: vocabulary.special_id(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
        ends = [vocabulary.special_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        prefix = "tokenizer.chat_template"
        return cls(
            build_backend(vocabulary),
            special_tokens={name: vocabulary.tokens[i] for name, i in named.items() if i is not None},
            eos_token_ids=[token_id for token_id in ends if token_id is not None],
            chat_templates={
                key.removeprefix(prefix).removeprefix(".") or "default": text
                for key, text in metadata.items()
                if key == prefix or key.startswith(f"{prefix}.")
            },
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as themselves.

        `add_special_tokens` puts the tokens around it that the model expects, such as a beginning of
        sequence.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, prompt_ids: Iterable[int] = ()
    ) -> str:
        """The text that ids spell, U+FFFD for bytes that are not UTF-8.

        `prompt_ids` come before them and say only whether these ids open the text. Ids that the
        tokenizer does not know spell nothing; a negative one is a ValueError.
        """
        pieces, skipped = self.token_bytes, self.special_ids if skip_special_tokens else ()
        data = b"".join(pieces[token_id] for token_id in ids if token_id not in skipped)
        strip = self.spaces_to_strip(prompt_ids, skip_special_tokens)
        leading = len(data) - len(data.lstrip(b" "))
        return data[min(strip, leading) :].decode("utf-8", "replace")

    def spaces_to_strip(self, prompt_ids: Iterable[int], skip_special_tokens: bool) -> int:
        """How many opening spaces do not belong to the text that follows these ids: none after any text."""
        skipped = self.special_ids if skip_special_tokens else ()
        if self.strip_start and any(self.token_bytes[i] for i in prompt_ids if i not in skipped):
            return 0
        return self.strip_start

    def token_text(self, token_id: int) -> str:
        """One token alone, its leading space kept, a special one written out, U+FFFD for a part of a
        character."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, by the model's chat template.

        `add_generation_prompt` opens the assistant's turn; `variables` reach the template by name. Raises
        ValueError if the model has no template, a message is malformed, or the template refuses.
        """
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            raise ValueError("the model has no chat template; give it a plain prompt instead")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name])
        return self._compiled[name].render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(self.special_tokens | variables),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of `render_chat`. The template is the authority on special tokens: none are added."""
        text = self.render_chat(messages, add_generation_prompt, tools, **variables)
        return self.encode(text, add_special_tokens=False)

    def _turn_end_ids(self) -> list[int]:
        template = self.chat_templates.get("default", "")
        ids = [self.backend.token_to_id(token) for token in _TURN_ENDS if token in template]
        return [token_id for token_id in ids if token_id is not None]

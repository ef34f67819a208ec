"""Builds a tokenizer from the vocabulary that a GGUF file carries in its metadata."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import compress
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from jaxserve.text.pre_tokenizers import DEFAULT, WORD_RULES, WordRules

_PREFIX = "tokenizer.ggml."
_SPACE_MARK = "▁"

SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the specification's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`: what a vocabulary entry is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocabulary:
    """A checked view of the `tokenizer.*` metadata of a GGUF file.

    Raises ValueError, naming the field, when one is missing, of the wrong length or not supported.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(self._require("model"))
        if self.model not in _BUILDERS:
            raise ValueError(
                f"{_PREFIX}model {self.model!r} is not supported; supported are {', '.join(_BUILDERS)}"
            )
        self.tokens: list[str] = list(self._require("tokens"))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise ValueError(f"{_PREFIX}tokens has {twice!r} more than once")
        types = self.get("token_type")
        self.types = [TokenType.NORMAL] * len(self.tokens) if types is None else self.per_token("token_type")

    def get(self, name: str, default: Any = None) -> Any:
        """The field `tokenizer.ggml.<name>`, or the default."""
        return self._metadata.get(_PREFIX + name, default)

    def per_token(self, name: str) -> list[Any]:
        """A field that has one value for each token."""
        values = list(self._require(name))
        if len(values) != len(self.tokens):
            raise ValueError(f"{_PREFIX}{name} has {len(values)} values for {len(self.tokens)} tokens")
        return values

    def special_id(self, name: str) -> int | None:
        """A special token's id, such as `bos_token_id`, checked against the vocabulary."""
        value = self.get(name, _SENTENCEPIECE_IDS.get(name) if self.model == "llama" else None)
        if value is None:
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise ValueError(f"{_PREFIX}{name} {value} is outside the vocabulary of {len(self.tokens)} ids")
        return int(value)

    def merges(self) -> list[tuple[str, str]]:
        """The merge rules, best first: each joins two tokens, which hold no space themselves."""
        merges: list[tuple[str, str]] = []
        for rule in self._require("merges"):
            left, _, right = rule.partition(" ")
            if not left or not right or " " in right:
                raise ValueError(f"{_PREFIX}merges has {rule!r}, which is not two tokens and a space")
            merges.append((left, right))
        return merges

    def _require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"the GGUF metadata has no {_PREFIX}{name}")
        return value


def build_backend(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """The `tokenizers` object that cuts text as llama.cpp does with the same file."""
    backend, add_bos = _BUILDERS[vocabulary.model](vocabulary)
    # A file's user-defined tokens are text that is never cut; control and unknown ones are not text.
    backend.add_special_tokens(
        _added_tokens(vocabulary, {TokenType.CONTROL, TokenType.UNKNOWN}, special=True)
    )
    backend.add_tokens(_added_tokens(vocabulary, {TokenType.USER_DEFINED}, special=False))
    before = _sequence_mark(vocabulary, "bos", default=add_bos)
    after = _sequence_mark(vocabulary, "eos", default=False)
    set_sequence_marks(backend, before, after)
    return backend


def _added_tokens(vocabulary: GgufVocabulary, kinds: set[TokenType], *, special: bool) -> list[AddedToken]:
    chosen = compress(vocabulary.tokens, map(kinds.__contains__, vocabulary.types))
    return [AddedToken(token, normalized=False, special=special) for token in chosen if token]


def set_sequence_marks(
    backend: tokenizers.Tokenizer, before: tuple[str, int] | None, after: tuple[str, int] | None
) -> None:
    """Put a special token (its text and id) before and after every encoded text, or neither."""
    marks = [mark for mark in (before, after) if mark]
    template = [*([before[0]] if before else []), "$A", *([after[0]] if after else [])]
    backend.post_processor = (  # pyright: ignore[reportAttributeAccessIssue]
        processors.TemplateProcessing(single=template, special_tokens=marks) if marks else None
    )


def _sequence_mark(vocabulary: GgufVocabulary, name: str, *, default: bool) -> tuple[str, int] | None:
    stated = vocabulary.get(f"add_{name}_token")
    if not (default if stated is None else stated):
        return None
    token_id = vocabulary.special_id(f"{name}_token_id")
    if token_id is None:
        raise ValueError(f"the GGUF metadata asks for a {name} token but has no {_PREFIX}{name}_token_id")
    return vocabulary.tokens[token_id], token_id


def _byte_level(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    rules = _word_rules(vocabulary.get("pre"))
    model = _bpe(vocabulary.ids, vocabulary.merges(), ignore_merges=rules.whole_words)
    backend = tokenizers.Tokenizer(model)
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = rules.pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend, rules.add_bos


def _word_rules(pre: str | None) -> WordRules:
    if pre is None:
        warnings.warn(
            f"the GGUF metadata has no {_PREFIX}pre: words are cut by the rule {DEFAULT!r}, "
            "which may not be the one that the model was trained with",
            stacklevel=2,
        )
        pre = DEFAULT
    if pre not in WORD_RULES:
        raise ValueError(f"{_PREFIX}pre {pre!r} is not supported; supported are {', '.join(WORD_RULES)}")
    return WORD_RULES[pre]


def _sentencepiece(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    merges = _merges_of_scores(vocabulary)
    unknown = vocabulary.special_id("unknown_token_id")
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = tokenizers.Tokenizer(
        _bpe(vocabulary.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    )
    prefix = bool(vocabulary.get("add_space_prefix", True))
    marks: list[Any] = [normalizers.Replace(" ", _SPACE_MARK)]
    backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend(_SPACE_MARK), *marks] if prefix else marks
    )
    spell: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [*spell, decoders.Strip(" ", 1, 0)] if prefix else spell
    )
    return backend, True


def _merges_of_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Merge rules equal to SentencePiece's: join the neighbours whose union scores best.

    Each way of cutting a piece into two others is a rule; rules rank by the score of the union, then by
    its id. SentencePiece never makes control, unknown or byte pieces out of text.
    """
    scores, ids = vocabulary.per_token("scores"), vocabulary.ids
    normal = [index for index, kind in enumerate(vocabulary.types) if kind == TokenType.NORMAL]
    normal.sort(key=scores.__getitem__, reverse=True)
    return [
        (left, right)
        for piece in map(vocabulary.tokens.__getitem__, normal)
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in ids and (right := piece[cut:]) in ids
    ]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ValueError(f"{_PREFIX}merges does not fit {_PREFIX}tokens: {error}") from error


_BUILDERS: dict[str, Callable[[GgufVocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}

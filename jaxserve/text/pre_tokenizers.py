"""How each family of byte-level BPE cuts text into words, by the name that GGUF files give it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern of the Llama 3 and Qwen 2 vocabularies, which differ in how they group digits."""
    return rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    """The pattern of the Tekken and GPT-4o vocabularies, which also cut before a capital letter."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class WordRules:
    """What a `tokenizer.ggml.pre` name stands for.

    patterns: applied one after another, each cutting what the ones before have left; both matches and
        what lies between them are words. nfc: text is normalised first, as the model's own tokenizer
        does. whole_words: a word that is a token is that token, whatever the merges say. add_bos: whether
        the family's prompts open with the beginning-of-sequence token unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_PLAIN = WordRules((_GPT2,))
_SINGLE_DIGITS = WordRules((r"\p{N}", _GPT2))
_LLAMA3 = WordRules((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_QWEN2 = WordRules((_words(r"\p{N}"),), nfc=True)

DEFAULT = "default"

WORD_RULES: dict[str, WordRules] = {
    # What llama.cpp does with a file that does not name its rules.
    DEFAULT: WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": WordRules((_cased_words(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "gpt-4o": WordRules((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)),
}

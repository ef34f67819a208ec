"""From Lark source to `llguidance`'s parser, within bounds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_MESSAGE = 300

_LIMITS = {
    "max_lexer_states": 50_000,  # up to 15 MB of one grammar, where the default allows 65
    "verbose_errors": False,  # which would print the grammar
}
_SOURCE = re.compile(r"<non-verbose/>|^(at )?\d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
"""Where in the Lark source a fault lies, and that source: not what the grammar's author wrote."""
_TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex", "lexer error", "too many", "too big", "too large")


def build_parser(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A parser at the start of its grammar. Releases the interpreter's lock.

    Raises ValueError if the grammar is malformed, unsatisfiable or over a limit.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser = LLMatcher(
        tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=LLParserLimits(**_LIMITS)
    )
    check_parser(parser)
    return parser


def check_parser(parser: LLMatcher) -> None:
    """Raise ValueError if a parser has failed: it says so only when asked, and then for ever."""
    if not parser.is_error():
        return
    message = " ".join(_SOURCE.sub("", parser.get_error()).split())
    if "NoExtension" in message:
        message = "no text of it can be spelled with this vocabulary"
    elif "oneOf constraints" in message:
        message = "oneOf is supported only where its branches exclude one another; anyOf always is"
    elif any(sign in message for sign in _TOO_COMPLEX):
        message = f"it is too complex: {message}"
    raise ValueError(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...")

"""Text in and out: tokenizers, chat templates, detokenization, stop strings."""

from jaxserve.text.answer import AnswerText
from jaxserve.text.chat_template import ChatTemplate, Message
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.fingerprint import require_same_vocabulary, tokenizer_fingerprint
from jaxserve.text.stop_strings import StopStringMatcher
from jaxserve.text.tokenizer import Tokenizer

__all__ = [
    "AnswerText",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "Message",
    "StopStringMatcher",
    "Tokenizer",
    "require_same_vocabulary",
    "tokenizer_fingerprint",
]

"""Which tokenizer it is, whatever its files are called."""

from __future__ import annotations

import hashlib
import json

from jaxserve.text.tokenizer import Tokenizer


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of all that decides which ids a text or a conversation becomes."""
    rest = [tokenizer.special_tokens, tokenizer.chat_templates, tokenizer.eos_token_ids]
    digest = hashlib.sha256(tokenizer.backend.to_str().encode())
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()[:32]

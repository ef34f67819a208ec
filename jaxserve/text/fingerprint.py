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


def require_same_vocabulary(one: Tokenizer, one_name: str, other: Tokenizer, other_name: str) -> None:
    """Raise ValueError, naming both, unless each token id is the same text to two tokenizers.

    How they cut a text, and their templates, may differ.
    """
    ours, theirs = (
        {token_id: token for token, token_id in each.backend.get_vocab(with_added_tokens=True).items()}
        for each in (one, other)
    )
    if ours == theirs:
        return
    same = f"{one_name} must have the vocabulary of {other_name}"
    if len(ours) != len(theirs):
        raise ValueError(f"{same}: it has {len(ours)} tokens and that one {len(theirs)}")
    token_id = min(each for each in {*ours, *theirs} if ours.get(each) != theirs.get(each))
    raise ValueError(f"{same}: token {token_id} is {ours.get(token_id)!r}, there {theirs.get(token_id)!r}")

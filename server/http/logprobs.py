"""Log-probabilities in the three shapes that the API has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.outputs import Logprob, TokenLogprobs
from jaxserve.text import Tokenizer
from server.http.answers import Json, Round

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)


def _most_likely(at: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The alternatives that were asked for, most likely first."""
    return sorted(at.items(), key=lambda item: -item[1].logprob)[:num_top]


def chat_logprobs(rounds: Iterable[Round], num_top: int, tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> Json:
        spelled = tokenizer.token_bytes[token_id]
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(spelled),
        }

    content = []
    for token_id, at in rounds:
        assert at is not None  # Only a prompt's first token has none, and a chat answer shows no prompt.
        top = [entry(other, found.logprob) for other, found in _most_likely(at, num_top)]
        content.append(entry(token_id, at[token_id].logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of one completion choice, part by part: offsets go on from one to the next."""

    def __init__(self, num_top: int, tokenizer: Tokenizer) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._offset = 0

    def part(self, rounds: Iterable[Round]) -> Json:
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, at in rounds:
            tokens.append(self._tokenizer.token_text(token_id))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
            logprobs.append(None if at is None else _finite(at[token_id].logprob))
            tops.append(None if at is None else self._top(token_id, at))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, at: TokenLogprobs) -> dict[str, float]:
        """By text, the chosen token always among them; of two with one text the likelier stands."""
        entries = dict(_most_likely(at, self._num_top)) | {token_id: at[token_id]}
        texts: dict[str, float] = {}
        for other, found in sorted(entries.items(), key=lambda item: -item[1].logprob):
            texts.setdefault(self._tokenizer.token_text(other), _finite(found.logprob))
        return texts


def prompt_logprobs_json(prompt_logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, by token id."""
    return [
        None
        if at is None
        else {
            str(token_id): found._asdict() | {"logprob": _finite(found.logprob)}
            for token_id, found in at.items()
        }
        for at in prompt_logprobs
    ]

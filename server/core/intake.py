"""What a request becomes for one model's engine: token ids, and the parameters in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.text import Message, Tokenizer
from server.core.errors import ServiceError, Status
from server.core.requests import GenerateRequest

_LEAST_TEXT_LIMIT = 1_000_000
"""Characters that may be tokenized, however short the model's sequences are."""


class Intake:
    """Reads requests for one model. Holds no state of its own; safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, limits: EngineLimits, sampling_defaults: Mapping[str, Any]
    ) -> None:
        """`sampling_defaults`: the model's own values of parameters that a request leaves out, by name."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling_defaults = sampling_defaults
        # A longer text is refused before time is spent on encoding it.
        longest_token = max(map(len, tokenizer.backend.get_vocab()))
        self._longest_text = max(limits.max_model_len * longest_token, _LEAST_TEXT_LIMIT)

    def token_ids(self, request: GenerateRequest) -> Sequence[int]:
        """Those of a checked request's prompt. Raises ServiceError as `render` and `encode` do."""
        if request.token_ids is not None:
            return request.token_ids
        return self.encode(*self.text(request))

    def text(self, request: GenerateRequest) -> tuple[str, bool]:
        """The prompt of a checked request that has no token ids, and whether special tokens are added to it.

        Raises ServiceError as `render` does.
        """
        if request.messages is not None:
            return self.render(request.messages, request.template_variables), False
        assert request.text is not None, "the request has been checked"
        return request.text, request.add_special_tokens

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """A conversation as one text, by the chat template.

        Raises ServiceError, INVALID_ARGUMENT, if there is no template or it refuses.
        """
        try:
            return self._tokenizer.render_chat(messages, **variables)
        except (ValueError, TypeError) as error:
            raise ServiceError(Status.INVALID_ARGUMENT, str(error)) from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises ServiceError, INVALID_ARGUMENT, for one that is longer than any sequence could spell.
        """
        if len(text) > self._longest_text:
            raise ServiceError(
                Status.INVALID_ARGUMENT,
                f"the text has {len(text)} characters; the limit is {self._longest_text}",
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def params(self, request: GenerateRequest, num_prompt: int) -> SamplingParams:
        """The parameters in force. Raises ValueError where what the prompt leaves is out of their range."""
        names = request.absent & self._sampling_defaults.keys()
        chosen = {name: self._sampling_defaults[name] for name in names}
        if request.until_full and "max_tokens" not in chosen:
            # A prompt that leaves no room is refused by the engine, which names the limit.
            room = self._limits.longest_answer(num_prompt, None)
            chosen["max_tokens"] = max(room, request.params.min_tokens)
        return replace(request.params, **chosen) if chosen else request.params

"""`/tokenize` and `/detokenize`, which are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from server.http.answers import Json
from server.http.conversation import CONVERSATION_NEUTRAL, read_conversation
from server.http.errors import bad_request
from server.http.fields import Fields
from server.http.requests import ChatPrompt, TextPrompt
from server.http.tools import read_tools


@dataclass(frozen=True)
class TokenizeCall:
    model: str | None
    prompt: TextPrompt | ChatPrompt
    return_token_strs: bool
    """Each token's text beside its id."""


def read_tokenize(body: Json) -> TokenizeCall:
    """A checked request. Raises ApiError (400) unless it has one of prompt and messages."""
    fields = Fields(body)
    model = fields.text("model")
    return_token_strs = fields.flag("return_token_strs")
    text = fields.text("prompt")
    if text is not None:
        prompt = TextPrompt(text, fields.flag("add_special_tokens", True))
    elif "messages" in body:
        prompt = read_conversation(fields, read_tools(fields))
    else:
        raise bad_request("a request needs one of prompt, a text, and messages", "prompt")
    fields.finish(CONVERSATION_NEUTRAL)
    return TokenizeCall(model, prompt, return_token_strs)


def read_detokenize(body: Json) -> tuple[str | None, list[int]]:
    """The model and the token ids. Raises ApiError (400) without ids."""
    fields = Fields(body)
    model, token_ids = fields.text("model"), fields.token_ids("tokens")
    if token_ids is None:
        raise bad_request("a request needs tokens, a list of token ids", "tokens")
    fields.finish()
    return model, token_ids

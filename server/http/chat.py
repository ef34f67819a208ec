"""`/v1/chat/completions`: the request as it is read, the answer as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.text import Message, Tokenizer
from server.http.answers import Identity, Json, choice_end, rounds_of, usage_of
from server.http.errors import bad_request
from server.http.fields import Fields, Neutral, is_nothing, is_one_of, shown
from server.http.logprobs import chat_logprobs, prompt_logprobs_json
from server.http.parameters import NEUTRAL, UNLIMITED, read_sampling, read_stream_options
from server.http.requests import Call, ChatPrompt

CONVERSATION_NEUTRAL: Neutral = {
    "continue_final_message": is_one_of(False),
    "add_special_tokens": is_one_of(False),
    "chat_template": is_nothing,
    "tools": is_one_of([]),
}
"""A conversation becomes a prompt by the model's own template."""

_NEUTRAL: Neutral = {
    **NEUTRAL,
    **CONVERSATION_NEUTRAL,
    "tool_choice": is_one_of("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "functions": is_one_of([]),
    "function_call": is_one_of("none", "auto"),
    "modalities": is_one_of(["text"]),
    "reasoning_effort": is_one_of("none"),
    "verbosity": is_one_of("medium"),
    "echo": is_one_of(False),
    "documents": is_one_of([]),
    "audio": is_nothing,
    "prediction": is_nothing,
    "web_search_options": is_nothing,
}


def read_chat(body: Json) -> Call:
    """A checked request. Raises ApiError (400) naming the parameter that is wrong.

    Without a limit of its own an answer may take what the prompt leaves of the context.
    """
    fields = Fields(body)
    model = fields.text("model")
    prompt = read_conversation(fields)
    stream = read_stream_options(fields)
    prompt_logprobs = fields.integer("prompt_logprobs")
    if stream.stream and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    max_completion_tokens, max_tokens = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    limit = max_tokens if max_completion_tokens is None else max_completion_tokens
    params = read_sampling(
        fields,
        max_tokens=UNLIMITED if limit is None else limit,
        logprobs=_read_logprobs(fields),
        prompt_logprobs=prompt_logprobs,
    )
    return_token_ids = fields.flag("return_token_ids")
    fields.finish(_NEUTRAL)
    return Call(
        model=model,
        prompts=(prompt,),
        params=params,
        until_full=limit is None,
        stream=stream,
        return_token_ids=return_token_ids,
        return_prompt_logprobs=prompt_logprobs is not None,
    )


def read_conversation(fields: Fields) -> ChatPrompt:
    """Take `messages`, objects with a role and text as content, and what else the chat template gets."""
    opened = fields.flag("add_generation_prompt", True)
    variables = fields.mapping("chat_template_kwargs") or {}
    return ChatPrompt(_read_messages(fields), variables | {"add_generation_prompt": opened})


def _read_messages(fields: Fields) -> list[Message]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", messages, "a list of at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request(f"{where} is {shown(message)}; expected an object with a role", where)
        _check_content(message.get("content"), f"{where}.content")
    return messages


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad_request(f"{where} is {shown(content)}; expected a string or a list of text parts", where)
    for part in content:
        match part:
            case {"type": "text", "text": str()}:
                continue
            case {"type": str(kind)} if kind != "text":
                raise bad_request(f"{where} has a part of type {shown(kind)}; only text is supported", where)
        raise bad_request(f"{where} has a part {shown(part)}; expected type text and a text", where)


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs")
    if top is not None and not wanted:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if top is not None and top < 0:
        raise bad_request(f"top_logprobs {top} is out of range: it must be at least 0", "top_logprobs")
    return (top or 0) if wanted else None


class ChatAnswer:
    """Writes the answer to one call, whole or in chunks."""

    def __init__(self, call: Call, identity: Identity, tokenizer: Tokenizer) -> None:
        self._call = call
        self._identity = identity
        self._tokenizer = tokenizer

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        choices = []
        for sample in output.outputs:
            message = {"role": "assistant", "content": sample.text, "refusal": None}
            choice = {"index": sample.index, "message": message, "logprobs": None}
            if sample.logprobs is not None:
                rounds = rounds_of(sample.token_ids, sample.logprobs)
                choice["logprobs"] = chat_logprobs(rounds, self._num_top, self._tokenizer)
            choice |= choice_end(sample.finish_reason, sample.stop_reason)
            if self._call.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        body = self._identity.head("chat.completion") | {"choices": choices, "usage": usage_of(outputs)}
        if self._call.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return body

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[Json]:
        """The chunks that give each choice its role."""
        role = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk({"index": index, "delta": role, "logprobs": None} | choice_end(None, None))
            for index in range(self._call.params.n)
        ]
        if self._call.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(prompts[0])
        return chunks

    def chunk(self, prompt_index: int, delta: AnswerDelta) -> Json | None:
        """What a delta is on the wire; None if it has nothing to show."""
        if not (delta.text or delta.logprobs or delta.finish_reason or self._call.return_token_ids):
            return None
        said: Json = {"content": delta.text} if delta.text else {}
        choice = {"index": delta.index, "delta": said, "logprobs": None}
        if delta.logprobs:
            rounds = rounds_of(delta.token_ids, delta.logprobs)
            choice["logprobs"] = chat_logprobs(rounds, self._num_top, self._tokenizer)
        choice |= choice_end(delta.finish_reason, delta.stop_reason)
        if self._call.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice)

    def closing(self, usage: Json) -> Json:
        """The chunk that brings the usage alone."""
        return self._identity.head("chat.completion.chunk") | {"choices": [], "usage": usage}

    @property
    def _num_top(self) -> int:
        return self._call.params.logprobs or 0

    def _chunk(self, choice: Json) -> Json:
        return self._identity.head("chat.completion.chunk") | {"choices": [choice]}

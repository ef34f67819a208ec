"""`/v1/chat/completions`: the request as it is read, the answer as it is written."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.outputs import AnswerDelta, CompletionOutput, RequestOutput
from jaxserve.text import Tokenizer
from server.http.answers import Identity, Json, choice_end, rounds_of, usage_of
from server.http.conversation import CONVERSATION_NEUTRAL, read_conversation
from server.http.errors import bad_request
from server.http.fields import Fields, Neutral, is_nothing, is_one_of
from server.http.logprobs import chat_logprobs, prompt_logprobs_json
from server.http.parameters import NEUTRAL, UNLIMITED, read_sampling, read_stream_options
from server.http.requests import Call
from server.http.speech import PlainSpeech, whole_message
from server.http.tool_speech import ToolSpeech
from server.http.tools import held_to, read_tool_use

_NEUTRAL: Neutral = {
    "continue_final_message": is_one_of(False),
    "add_special_tokens": is_one_of(False),
    "chat_template": is_nothing,
    "tools": is_one_of([]),
}
"""A conversation becomes a prompt by the model's own template."""

_NEUTRAL: Neutral = {
    **NEUTRAL,
    **CONVERSATION_NEUTRAL,
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
    tools = read_tool_use(fields)
    prompt = read_conversation(fields, () if tools is None else tools.tools)
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
        params=held_to(params, tools),
        tools=tools,
        until_full=limit is None,
        stream=stream,
        return_token_ids=return_token_ids,
        return_prompt_logprobs=prompt_logprobs is not None,
    )


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

    def __init__(self, call: Call, identity: Identity, tokenizer: Tokenizer, tool_speech: ToolSpeech) -> None:
        self._call = call
        self._identity = identity
        self._tokenizer = tokenizer
        make_speech = tool_speech.choose(call.tools, identity.model, tokenizer)
        self._speeches = [make_speech() for _ in range(call.params.n)]
        """Of each sample."""
        self.plain = not call.return_token_ids and all(isinstance(one, PlainSpeech) for one in self._speeches)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        choices = [self._whole_choice(sample) for sample in output.outputs]
        body = self._identity.head("chat.completion") | {"choices": choices, "usage": usage_of(outputs)}
        if self._call.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return body

    def _whole_choice(self, sample: CompletionOutput) -> Json:
        speech = self._speeches[sample.index]
        message = whole_message(speech, sample.text)
        choice: Json = {"index": sample.index, "message": message, "logprobs": None}
        if sample.logprobs is not None:
            rounds = rounds_of(sample.token_ids, sample.logprobs)
            choice["logprobs"] = chat_logprobs(rounds, self._num_top, self._tokenizer)
        choice |= choice_end(speech.finish_reason(sample.finish_reason), sample.stop_reason)
        if self._call.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

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
        speech = self._speeches[delta.index]
        said = speech.delta(delta.text, ended=delta.finish_reason is not None)
        if not (said or delta.logprobs or delta.finish_reason or self._call.return_token_ids):
            return None
        choice: Json = {"index": delta.index, "delta": said, "logprobs": None}
        if delta.logprobs:
            rounds = rounds_of(delta.token_ids, delta.logprobs)
            choice["logprobs"] = chat_logprobs(rounds, self._num_top, self._tokenizer)
        choice |= choice_end(speech.finish_reason(delta.finish_reason), delta.stop_reason)
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

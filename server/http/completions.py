"""`/v1/completions`: the request as it is read, the answer as it is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.outputs import AnswerDelta, CompletionOutput, RequestOutput
from jaxserve.text import Tokenizer
from server.http.answers import Identity, Json, choice_end, rounds_of, usage_of
from server.http.errors import bad_request
from server.http.fields import Fields, Neutral, is_one_of, is_token_ids
from server.http.logprobs import CompletionLogprobs, prompt_logprobs_json
from server.http.parameters import NEUTRAL, read_sampling, read_stream_options
from server.http.requests import Call, PromptInput, TextPrompt, TokensPrompt

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_CHOICES = 1024

_NEUTRAL: Neutral = {**NEUTRAL, "suffix": is_one_of("")}


def read_completion(body: Json) -> Call:
    """A checked request. Raises ApiError (400) naming the parameter that is wrong."""
    fields = Fields(body)
    model = fields.text("model")
    prompts = read_prompts(fields)
    stream = read_stream_options(fields)
    echo = fields.flag("echo")
    logprobs = fields.integer("logprobs")
    prompt_logprobs = fields.integer("prompt_logprobs")
    if stream.stream and prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    if stream.stream and echo and logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed; set stream to false", "echo")
    max_tokens = fields.integer("max_tokens")
    params = read_sampling(
        fields,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if echo and logprobs is not None:
        params = replace(params, prompt_logprobs=max(logprobs, prompt_logprobs or 0))
    if len(prompts) * params.n > MAX_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts of {params.n} samples each: the limit is {MAX_CHOICES} in all", "n"
        )
    return_token_ids = fields.flag("return_token_ids")
    fields.finish(_NEUTRAL)
    return Call(
        model=model,
        prompts=prompts,
        params=params,
        stream=stream,
        return_token_ids=return_token_ids,
        echo=echo,
        return_prompt_logprobs=prompt_logprobs is not None,
    )


def read_prompts(fields: Fields) -> tuple[PromptInput, ...]:
    """Take `prompt`: a text, texts, token ids, or lists of them."""
    value = fields.take("prompt")
    add_special_tokens = fields.flag("add_special_tokens", True)
    if isinstance(value, str):
        return (TextPrompt(value, add_special_tokens),)
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", value, "a text, token ids, or a list of them")
    if isinstance(value[0], int) and is_token_ids(value):
        return (TokensPrompt(value),)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(value)} prompts; the limit is {MAX_PROMPTS}", "prompt")
    if all(isinstance(one, str) for one in value):
        return tuple(TextPrompt(one, add_special_tokens) for one in value)
    if all(is_token_ids(one) for one in value):
        return tuple(TokensPrompt(one) for one in value)
    raise fields.wrong("prompt", value, "a text, token ids, or a list of them")


class CompletionAnswer:
    """Writes the answer to one call, whole or in chunks: choice = prompt * n + sample."""

    def __init__(self, call: Call, identity: Identity, tokenizer: Tokenizer) -> None:
        self._call = call
        self._identity = identity
        self._tokenizer = tokenizer
        self.plain = not call.return_token_ids
        num_top = call.params.logprobs or 0
        self._logprobs = defaultdict[int, CompletionLogprobs](lambda: CompletionLogprobs(num_top, tokenizer))
        """Of each choice."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [
            self._whole_choice(prompt_index, output, sample)
            for prompt_index, output in enumerate(outputs)
            for sample in output.outputs
        ]
        return self._identity.head("text_completion") | {"choices": choices, "usage": usage_of(outputs)}

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[Json]:
        """The chunks that bring what was asked for of the prompts, if anything was."""
        call = self._call
        if not (call.echo or call.return_token_ids):
            return []
        return [
            self._opening_chunk(prompt_index, sample_index, token_ids)
            for prompt_index, token_ids in enumerate(prompts)
            for sample_index in range(call.params.n)
        ]

    def _opening_chunk(self, prompt_index: int, sample_index: int, token_ids: Sequence[int]) -> Json:
        call = self._call
        choice: Json = {
            "index": self._index(prompt_index, sample_index),
            "text": self._prompt_text(call.prompts[prompt_index]) if call.echo else "",
            "logprobs": None,
        } | choice_end(None, None)
        if call.return_token_ids:
            choice |= {"prompt_token_ids": list(token_ids), "token_ids": []}
        return self._chunk(choice)

    def chunk(self, prompt_index: int, delta: AnswerDelta) -> Json | None:
        if not (delta.text or delta.logprobs or delta.finish_reason or self._call.return_token_ids):
            return None
        index = self._index(prompt_index, delta.index)
        choice: Json = {"index": index, "text": delta.text, "logprobs": None}
        if delta.logprobs:
            choice["logprobs"] = self._logprobs[index].part(rounds_of(delta.token_ids, delta.logprobs))
        choice |= choice_end(delta.finish_reason, delta.stop_reason)
        if self._call.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice)

    def closing(self, usage: Json) -> Json:
        return self._identity.head("text_completion") | {"choices": [], "usage": usage}

    def _whole_choice(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Json:
        index = self._index(prompt_index, sample.index)
        echoed = self._prompt_text(self._call.prompts[prompt_index]) if self._call.echo else ""
        choice: Json = {"index": index, "text": echoed + sample.text, "logprobs": None}
        if sample.logprobs is not None:
            rounds = rounds_of(sample.token_ids, sample.logprobs)
            if self._call.echo and output.prompt_logprobs is not None:
                rounds = rounds_of(output.prompt_token_ids, output.prompt_logprobs) + rounds
            choice["logprobs"] = self._logprobs[index].part(rounds)
        choice |= choice_end(sample.finish_reason, sample.stop_reason)
        if self._call.return_token_ids:
            choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": sample.token_ids}
        if self._call.return_prompt_logprobs and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return choice

    def _index(self, prompt_index: int, sample_index: int) -> int:
        return prompt_index * self._call.params.n + sample_index

    def _prompt_text(self, prompt: PromptInput) -> str:
        if isinstance(prompt, TokensPrompt):
            return self._tokenizer.decode(prompt.token_ids, self._call.params.skip_special_tokens)
        assert isinstance(prompt, TextPrompt)  # A conversation has an endpoint of its own.
        return prompt.text

    def _chunk(self, choice: Json) -> Json:
        return self._identity.head("text_completion") | {"choices": [choice]}

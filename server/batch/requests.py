"""From a line to what the engine is asked, by the same readers as the HTTP door's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxserve.loop import HostLoop
from jaxserve.plan import MAX_SEED, SamplingParams
from jaxserve.prompts import EncodedPrompt
from jaxserve.scheduling import ServiceTerms
from jaxserve.text import Tokenizer
from server.batch.errors import LineError
from server.batch.lines import MAX_LINE_BYTES, InputLine
from server.core import GenerateRequest, Routes, ServiceError, Status
from server.core.grammars import follow
from server.core.intake import Intake
from server.http.answers import AnswerFormat, Identity, Json, new_name
from server.http.chat import ChatAnswer, read_chat
from server.http.completions import CompletionAnswer, read_completion
from server.http.errors import ApiError, bad_request
from server.http.fields import Fields, shown
from server.http.generation_requests import generate_requests
from server.http.json_object import parse_object
from server.http.requests import Call
from server.http.terms import split_terms
from server.http.tool_speech import ToolSpeech


class _Endpoint(NamedTuple):
    prefix: str
    """Of an answer's id."""
    read: Callable[[Json], Call]


_ENDPOINTS = {
    "/v1/chat/completions": _Endpoint("chatcmpl", read_chat),
    "/v1/completions": _Endpoint("cmpl", read_completion),
}


@dataclass(frozen=True)
class LineRequest:
    """A line in the batch format; what its body asks for has not been looked at."""

    line: InputLine
    custom_id: str
    url: str
    body: Json


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt of a request, checked: the engine takes it."""

    key: bytes
    """Its token ids, four bytes each, the highest first: compared as bytes they sort as ids do."""
    text: str | None
    """For the record, where it was given."""
    params: SamplingParams
    terms: ServiceTerms

    @property
    def encoded(self) -> EncodedPrompt:
        return EncodedPrompt(np.frombuffer(self.key, ">u4").tolist(), self.text)


@dataclass(frozen=True)
class PreparedRequest:
    """All that is needed to answer a line."""

    line: InputLine
    custom_id: str
    request_id: str
    prompts: Sequence[PreparedPrompt]
    answer: AnswerFormat

    @property
    def sort_key(self) -> tuple[bytes, int]:
        """Requests that begin alike are neighbours by it; no two are equal."""
        return (self.prompts[0].key, self.line.number)

    @property
    def num_samples(self) -> int:
        return sum(prompt.params.n for prompt in self.prompts)


def read_line(line: InputLine) -> LineRequest:
    """Raises LineError for a line that is not in the batch format."""
    if line.data is None:
        raise LineError("line_too_long", f"it is longer than the limit of {MAX_LINE_BYTES} bytes")
    try:
        fields = Fields(parse_object(line.data, "it"))
    except ApiError as error:
        raise LineError("invalid_json_line", error.message) from None
    custom_id = None
    try:
        custom_id = fields.text("custom_id")
        method, url, body = fields.text("method"), fields.text("url"), fields.mapping("body")
        fields.finish()
    except ApiError as error:
        raise LineError("invalid_line", error.message, custom_id) from None
    if not custom_id:
        raise LineError("invalid_line", "custom_id is missing")
    if body is None:
        raise LineError("invalid_line", "body is missing", custom_id)
    if method != "POST":
        raise LineError("invalid_method", f"method is {shown(method)}; expected POST", custom_id)
    if url not in _ENDPOINTS:
        known = " or ".join(_ENDPOINTS)
        raise LineError("invalid_url", f"url is {shown(url)}; expected {known}", custom_id)
    return LineRequest(line, custom_id, url, body)


class Preparer:
    """Makes requests of lines, for one model."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        loop: HostLoop,
        intake: Intake,
        tool_speech: ToolSpeech,
        *,
        seed: int = 0,
    ) -> None:
        """Prepare for a loop.

        Args:
            model: the name that bodies may call it by.
            tokenizer: the model's.
            loop: what requests must fit.
            intake: the model's.
            tool_speech: finds the tool calls of answers.
            seed: what the seeds of requests that name none are made from, with the line.
        """
        self._routes = Routes({model: None})
        self._tokenizer = tokenizer
        self._loop = loop
        self._intake = intake
        self._tool_speech = tool_speech
        self._seed = seed

    def prepare(self, asked: LineRequest) -> PreparedRequest:
        """A request that the engine takes. Raises ApiError or ServiceError where a door would refuse it."""
        endpoint = _ENDPOINTS[asked.url]
        terms, body = split_terms(asked.body, {})
        call = endpoint.read(body)
        if call.stream.stream:
            raise bad_request("stream is true; the answers of a batch are whole", "stream")
        identity = Identity(new_name(endpoint.prefix), self._routes.resolve(call.model, "model"))
        self._routes.resolve(terms.fallback_route, "fallback route")
        requests = generate_requests(call, terms, identity.id)
        prompts = [self._prompt(one, asked.line, index) for index, one in enumerate(requests)]
        answer = self._answer(endpoint, call, identity)
        return PreparedRequest(asked.line, asked.custom_id, identity.id, prompts, answer)

    def _prompt(self, asked: GenerateRequest, line: InputLine, index: int) -> PreparedPrompt:
        asked.check()
        terms = asked.terms(arrival=0.0)
        follow(self._loop.grammars, asked.params.grammar)
        token_ids = self._intake.token_ids(asked)
        try:
            self._loop.policy.priority_class(terms)
            params = self._intake.params(asked, len(token_ids))
            self._loop.check(token_ids, params)
        except ValueError as error:
            raise ServiceError(Status.INVALID_ARGUMENT, str(error)) from error
        if params.seed is None:
            params = replace(params, seed=_seed(self._seed, line, index))
        return PreparedPrompt(np.asarray(token_ids, ">u4").tobytes(), asked.text, params, terms)

    def _answer(self, endpoint: _Endpoint, call: Call, identity: Identity) -> AnswerFormat:
        if endpoint.read is read_chat:
            return ChatAnswer(call, identity, self._tokenizer, self._tool_speech)
        return CompletionAnswer(call, identity, self._tokenizer)


def _seed(seed: int, line: InputLine, index: int) -> int:
    """The same for the same prompt of the same line, whenever it is answered."""
    digest = hashlib.sha256(f"{seed} {line.record_id} {index}".encode()).digest()
    return int.from_bytes(digest[:8]) & MAX_SEED

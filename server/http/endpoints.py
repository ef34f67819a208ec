"""One method for each address; what they have in common is in `app`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from jaxserve.text import Tokenizer
from server.core import GenerateRequest, Generation, Service
from server.core.trace import read_trace
from server.http.answers import AnswerFormat, Identity, Json
from server.http.body import read_json_object
from server.http.chat import ChatAnswer, read_chat
from server.http.completions import CompletionAnswer, read_completion
from server.http.errors import ApiError
from server.http.events import EventStream
from server.http.metrics import CONTENT_TYPE, Metrics
from server.http.options import HttpOptions
from server.http.requests import Call, ChatPrompt, PromptInput, TextPrompt
from server.http.streams import collect, while_connected
from server.http.tokens import read_detokenize, read_tokenize

_MakeAnswer = Callable[[Call, Identity, Tokenizer], AnswerFormat]


class Endpoints:
    """What the door answers, address by address. Each raises ApiError or ServiceError instead."""

    def __init__(self, service: Service, options: HttpOptions) -> None:
        self._service = service
        self._options = options
        self._metrics = Metrics(service)
        self._created = int(time.time())

    async def chat(self, request: Request) -> ASGIApp:
        call = read_chat(await self._body(request))
        return await self._answer(request, call, "chatcmpl", ChatAnswer)

    async def completions(self, request: Request) -> ASGIApp:
        call = read_completion(await self._body(request))
        return await self._answer(request, call, "cmpl", CompletionAnswer)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        asked = read_tokenize(await self._body(request))
        self._service.check_model(asked.model)
        prompt = asked.prompt
        if isinstance(prompt, ChatPrompt):
            token_ids = await self._service.tokenize_messages(prompt.messages, prompt.variables)
        else:
            token_ids = await self._service.tokenize(
                prompt.text, add_special_tokens=prompt.add_special_tokens
            )
        texts = [self._service.tokenizer.token_text(token_id) for token_id in token_ids]
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": self._service.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": texts if asked.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        model, token_ids = read_detokenize(await self._body(request))
        self._service.check_model(model)
        return JSONResponse({"prompt": self._service.detokenize(token_ids, skip_special_tokens=False)})

    async def health(self, request: Request) -> Response:
        """Liveness: a server whose engine has failed should be started again."""
        if self._service.engine.failure is not None:
            raise ApiError(503, "the engine has failed and serves nothing any more", retry_after=1)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Readiness: whether new requests should come here."""
        if not self._service.ready:
            raise ApiError(503, "no new requests are taken", retry_after=1)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _body(self, request: Request) -> Json:
        return await read_json_object(request, self._options.max_body_bytes, self._options.body_seconds)

    async def _answer(self, request: Request, call: Call, prefix: str, make_answer: _MakeAnswer) -> ASGIApp:
        identity = Identity.new(prefix, self._service.identity.name)
        answer = make_answer(call, identity, self._service.tokenizer)
        headers = {"x-request-id": identity.id}
        generations = await self._admit(call, identity.id, request)
        if call.stream.stream:
            return EventStream(
                generations,
                answer,
                include_usage=call.stream.include_usage,
                stall_seconds=self._options.stall_seconds,
                headers=headers,
            )
        try:
            outputs = await while_connected(request.receive, collect(generations))
        finally:
            await _close(generations)
        return JSONResponse(answer.whole(outputs), headers=headers)

    async def _admit(self, call: Call, name: str, request: Request) -> list[Generation]:
        """All prompts of a call, or none."""
        tenant, trace = request.scope["tenant"], read_trace(request.headers)
        generations: list[Generation] = []
        try:
            for index, prompt in enumerate(call.prompts):
                asked = _generate_request(call, prompt)
                asked = replace(
                    asked,
                    request_id=f"{name}-{index}",
                    tenant=tenant,
                    trace_parent=trace.parent,
                    trace_state=trace.state,
                )
                generations.append(await self._service.generate(asked))
        except BaseException:
            await _close(generations)
            raise
        return generations

    def _model(self) -> Json:
        name = self._service.identity.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": name,
            "parent": None,
            "max_model_len": self._service.limits.max_model_len,
        }


async def _close(generations: list[Generation]) -> None:
    for generation in generations:
        await generation.aclose()


def _generate_request(call: Call, prompt: PromptInput) -> GenerateRequest:
    asked = GenerateRequest(params=call.params, until_full=call.until_full, model=call.model)
    match prompt:
        case ChatPrompt(messages, variables):
            return replace(asked, messages=messages, template_variables=variables)
        case TextPrompt(text, add_special_tokens):
            return replace(asked, text=text, add_special_tokens=add_special_tokens)
        case _:
            return replace(asked, token_ids=prompt.token_ids)

"""One method for each address; what they have in common is in `app`."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from jaxserve.text import Tokenizer
from jaxserve.version import __version__
from server.core import Generation, Routes, RouteState, Service
from server.core.telemetry.prometheus import CONTENT_TYPE, Metrics
from server.core.tenants import flushed_scope
from server.core.trace import read_trace
from server.http.answers import AnswerFormat, Identity, Json, new_name, route_headers
from server.http.body import read_json_object
from server.http.chat import ChatAnswer, read_chat
from server.http.completions import CompletionAnswer, read_completion
from server.http.errors import ApiError
from server.http.events import EventStream
from server.http.generation_requests import generate_requests
from server.http.options import HttpOptions
from server.http.requests import Call, ChatPrompt
from server.http.streams import collect, while_connected
from server.http.terms import CallTerms, split_terms
from server.http.tokens import read_detokenize, read_tokenize
from server.http.tool_speech import ToolSpeech

_MakeAnswer = Callable[[Call, Identity, Tokenizer], AnswerFormat]


class Endpoints:
    """What the door answers, address by address. Each raises ApiError or ServiceError instead."""

    def __init__(self, routes: Routes, options: HttpOptions) -> None:
        self._routes = routes
        self._options = options
        self._metrics = Metrics(routes)
        self._tool_speech = ToolSpeech(options.tool_parser)
        self._created = int(time.time())

    async def root(self, request: Request) -> Response:
        """What is here, for whoever looks without knowing."""
        states = {name: self._routes.state(name).value for name in self._routes.names}
        paths = sorted({route.path for route in request.app.routes})
        return JSONResponse({"server": "jaxserve", "version": __version__, "models": states, "paths": paths})

    async def chat(self, request: Request) -> ASGIApp:
        terms, body = split_terms(await self._body(request), request.headers)
        return await self._answer(request, read_chat(body), terms, "chatcmpl", self._chat_answer)

    async def completions(self, request: Request) -> ASGIApp:
        terms, body = split_terms(await self._body(request), request.headers)
        return await self._answer(request, read_completion(body), terms, "cmpl", CompletionAnswer)

    async def models(self, request: Request) -> Response:
        """Those that are loaded; while none is, what else asks for a model hears."""
        if not self._routes.services:
            self._routes.service()
        return JSONResponse({"object": "list", "data": [self._model(one) for one in self._routes.services]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._routes.service(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        asked = read_tokenize(await self._body(request))
        service = self._routes.service(asked.model)
        prompt = asked.prompt
        if isinstance(prompt, ChatPrompt):
            token_ids = await service.tokenize_messages(prompt.messages, prompt.variables)
        else:
            token_ids = await service.tokenize(prompt.text, add_special_tokens=prompt.add_special_tokens)
        texts = [service.tokenizer.token_text(token_id) for token_id in token_ids]
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": service.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": texts if asked.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        model, token_ids = read_detokenize(await self._body(request))
        service = self._routes.service(model)
        return JSONResponse({"prompt": service.detokenize(token_ids, skip_special_tokens=False)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """vLLM's address for it: forgets what the caller's tenant shares, of every model or `?model=`."""
        name = request.query_params.get("model")
        services = [self._routes.service(name)] if name else self._routes.services
        scope = flushed_scope(request.scope["tenant"], request.query_params.get("namespace", ""))
        pages = {one.identity.name: await one.clear_prefix_cache(scope) for one in services}
        return JSONResponse({"forgotten_pages": pages})

    async def health(self, request: Request) -> Response:
        """Liveness: a server whose engine has failed should be started again."""
        if self._routes.failure is not None:
            raise ApiError(503, "the engine has failed and serves nothing any more", retry_after=1)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Readiness: whether new requests should come here, for every model or for the one that is named."""
        name = request.path_params.get("name")
        states = {one: self._routes.state(one).value for one in ([name] if name else self._routes.names)}
        waiting = [f"{one} is {state}" for one, state in states.items() if state != RouteState.READY.value]
        if waiting:
            raise ApiError(503, f"no new requests are taken: {', '.join(waiting)}", retry_after=1)
        return JSONResponse({"status": "ready", "models": states})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _body(self, request: Request) -> Json:
        return await read_json_object(request, self._options.max_body_bytes, self._options.body_seconds)

    async def _answer(
        self, request: Request, call: Call, terms: CallTerms, prefix: str, make_answer: _MakeAnswer
    ) -> ASGIApp:
        name = new_name(prefix)
        trace, tenant = read_trace(request.headers), request.scope["tenant"]
        asked = generate_requests(call, terms, name, tenant=tenant, trace=trace)
        generations = await self._routes.generate_all(asked)
        choice = generations[0].choice
        answer = make_answer(call, Identity(name, choice.route), self._routes.service(choice.route).tokenizer)
        headers = {"x-request-id": name} | route_headers(choice)
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

    def _chat_answer(self, call: Call, identity: Identity, tokenizer: Tokenizer) -> AnswerFormat:
        return ChatAnswer(call, identity, tokenizer, self._tool_speech)

    def _model(self, service: Service) -> Json:
        return {
            "id": service.identity.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": service.identity.model,
            "parent": None,
            "max_model_len": service.limits.max_model_len,
        }


async def _close(generations: list[Generation]) -> None:
    for generation in generations:
        await generation.aclose()

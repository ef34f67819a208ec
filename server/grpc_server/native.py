"""The native service, jaxserve.v1.Engine."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import grpc.aio

from jaxserve.version import __version__
from server.core import GenerateRequest, Routes, ServiceError, Status
from server.core.telemetry.prometheus import Metrics
from server.core.tenants import Tenants, flushed_scope
from server.grpc_server.caller import Caller, identify_caller
from server.grpc_server.native_conversation import read_messages, read_variables
from server.grpc_server.native_messages import (
    read_request,
    write_deltas,
    write_final,
    write_samples,
)
from server.grpc_server.native_reports import write_load, write_stats
from server.grpc_server.status import GRPC_CODES, reports_errors
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc

_Context = grpc.aio.ServicerContext


class NativeServicer(engine_pb2_grpc.EngineServicer):
    """See engine.proto for what each call promises."""

    def __init__(self, routes: Routes, tenants: Tenants) -> None:
        self._routes = routes
        self._tenants = tenants
        self._metrics = Metrics(routes)

    @reports_errors
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        caller = self._caller(context, request.tenant)
        asked = read_request(request, caller)
        async with await self._routes.generate(asked) as generation:
            while batch := await generation.next_batch():
                for response in write_deltas(batch):
                    await context.write(response)
        final = write_final(generation.request_id, *generation.result())
        await context.write(pb.GenerateResponse(final=final))

    @reports_errors
    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: _Context) -> None:
        if not request.requests:
            raise ServiceError(Status.INVALID_ARGUMENT, "the batch has no request")
        # As many at once as can run: the rest waits here, where it takes nobody's place in the queue.
        permits = {
            service.identity.name: asyncio.Semaphore(service.limits.num_slots)
            for service in self._routes.services
        }

        async def answer(index: int, message: pb.GenerateRequest) -> pb.GenerateBatchResponse:
            async with permits.get(message.model or self._routes.default, nullcontext()):
                return await self._answer(index, message, context)

        tasks = [asyncio.create_task(answer(*item)) for item in enumerate(request.requests)]
        try:
            for ended in asyncio.as_completed(tasks):
                await context.write(await ended)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self, index: int, message: pb.GenerateRequest, context: _Context
    ) -> pb.GenerateBatchResponse:
        """The whole result of one request of a batch. Raises ServiceError if nothing can be served at all."""
        try:
            caller = self._caller(context, message.tenant)
            answer = await self._answer_whole(read_request(message, caller))
            return pb.GenerateBatchResponse(index=index, answer=answer)
        except ServiceError as error:
            if error.status in (Status.INTERNAL, Status.UNAVAILABLE):
                raise
            return pb.GenerateBatchResponse(
                index=index,
                error=pb.Error(
                    code=GRPC_CODES[error.status].value[0],
                    message=error.message,
                    retry_after_seconds=error.retry_after,
                    reason=error.reason or None,
                ),
            )

    async def _answer_whole(self, asked: GenerateRequest) -> pb.BatchAnswer:
        async with await self._routes.generate(asked) as generation:
            while await generation.next_batch():
                pass
        output, receipt = generation.result()
        final = write_final(generation.request_id, output, receipt)
        return pb.BatchAnswer(samples=write_samples(output), final=final)

    @reports_errors
    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        service = self._routes.service(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise ServiceError(Status.INVALID_ARGUMENT, "there is neither text nor conversation to tokenize")
        if kind == "conversation":
            ids = await service.tokenize_messages(
                read_messages(request.conversation), read_variables(request.conversation)
            )
        else:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await service.tokenize(request.text, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=service.limits.max_model_len)

    @reports_errors
    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        service = self._routes.service(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=service.detokenize(request.token_ids, skip_special_tokens=skip))

    @reports_errors
    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        tenant = self._caller(context, request.tenant).tenant
        ids = dict.fromkeys(request.request_ids)
        return pb.AbortResponse(aborted=[name for name in ids if self._routes.abort(name, tenant)])

    @reports_errors
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        service = self._routes.service(request.model)
        identity, limits, tokenizer = service.identity, service.limits, service.tokenizer
        return pb.GetModelInfoResponse(
            model=identity.name,
            path=identity.path,
            family=identity.family,
            model_fingerprint=identity.fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            precision=identity.precision,
            kv_format=identity.kv_format,
            device=identity.device,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=limits.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            has_chat_template="default" in tokenizer.chat_templates,
            max_logprobs=limits.max_logprobs,
            engine_version=__version__,
        )

    @reports_errors
    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        routes = self._routes
        return pb.ListModelsResponse(
            models=[
                pb.ServedModel(name=name, state=routes.state(name).value, fallback=routes.fallback(name))
                for name in routes.names
            ]
        )

    @reports_errors
    async def GetLoad(self, request: pb.GetLoadRequest, context: _Context) -> pb.GetLoadResponse:
        return write_load(self._routes.service(request.model))

    @reports_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        stats = write_stats(self._routes.service(request.model))
        if request.with_metrics:
            stats.metrics = self._metrics.text().decode()
        return stats

    @reports_errors
    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: _Context
    ) -> pb.FlushPrefixCacheResponse:
        tenant = self._caller(context, request.tenant).tenant
        scope = flushed_scope(tenant, request.namespace)
        num_pages = await self._routes.service(request.model).clear_prefix_cache(scope)
        return pb.FlushPrefixCacheResponse(pages=num_pages)

    def _caller(self, context: _Context, claimed_tenant: str) -> Caller:
        return identify_caller(context, self._tenants, claimed_tenant)

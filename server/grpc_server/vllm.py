"""`vllm.grpc.engine.VllmEngine`, the service that gateways made for vLLM drive."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxserve.scheduling import CacheScope
from jaxserve.version import __version__
from server.core import GenerateRequest, Routes, RouteState, Service, ServiceError, Status
from server.core.tenants import Tenants, flushed_scope
from server.grpc_server.caller import identify_caller
from server.grpc_server.kv_events import EventWriter, kv_event_batches
from server.grpc_server.status import reports_errors
from server.grpc_server.tokenizer_archive import archive, chunks
from server.grpc_server.vllm_messages import ResponseWriter, read_request, truncate

_Context = grpc.aio.ServicerContext


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The protocol has no word for a model: it speaks of the first route, which answers.

    What is of vLLM alone, or not there yet, is UNIMPLEMENTED with a sentence.
    """

    def __init__(self, routes: Routes, tenants: Tenants) -> None:
        self._routes = routes
        self._tenants = tenants
        self._last_request = 0.0

    @reports_errors
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        self._last_request = time.time()
        asked = await self._truncated(read_request(request, identify_caller(context, self._tenants)), request)
        async with await self._routes.generate(asked) as generation:
            prompt_ids = generation.prompt_token_ids
            writer = ResponseWriter(asked.params, len(prompt_ids))
            while batch := await generation.next_batch():
                if request.stream:
                    for response in writer.chunks(batch, prompt_ids):
                        await context.write(response)
        output, _ = generation.result()
        for response in writer.completes(output):
            await context.write(response)

    async def _truncated(self, asked: GenerateRequest, request: pb.GenerateRequest) -> GenerateRequest:
        """The request with its prompt cut to length, where it asks for that."""
        if not request.sampling_params.HasField("truncate_prompt_tokens"):
            return asked
        ids = asked.token_ids
        if ids is None:
            ids = await self._service.tokenize(asked.text or "")
        limit = self._service.limits.max_model_len
        return replace(asked, token_ids=truncate(ids, request.sampling_params, limit))

    @reports_errors
    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        tenant = identify_caller(context, self._tenants).tenant
        for request_id in request.request_ids:
            self._routes.abort(request_id, tenant)
        return pb.AbortResponse()

    @reports_errors
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        state = self._routes.state(self._routes.default)
        return pb.HealthCheckResponse(healthy=state is RouteState.READY, message=state.value)

    @property
    def _service(self) -> Service:
        """Raises ServiceError, UNAVAILABLE, while it loads."""
        return self._routes.service()

    @reports_errors
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        identity, limits = self._service.identity, self._service.limits
        return pb.GetModelInfoResponse(
            model_path=identity.path,
            is_generation=True,
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=identity.name,
            tokenizer_path=identity.path,
            model_type=identity.family,
            eos_token_ids=limits.eos_token_ids,
            bos_token_id=self._service.tokenizer.bos_token_id,
            max_req_input_len=limits.max_model_len - 1,
        )

    @reports_errors
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: _Context
    ) -> pb.GetServerInfoResponse:
        identity, limits = self._service.identity, self._service.limits
        return pb.GetServerInfoResponse(
            active_requests=self._service.engine.num_open,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._service.started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=identity.kv_format,
            block_size=limits.page_size,
            model_dtype=identity.precision,
            max_num_seqs=limits.num_slots,
            constrained_decoding_start="first_token",
        )

    @reports_errors
    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise ServiceError(Status.INVALID_ARGUMENT, f"dp_rank {request.dp_rank}: there is only rank 0")
        load = self._service.load()
        held = load.num_pages - load.num_free_pages
        one = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=held * load.page_size,
            max_total_num_tokens=load.num_pages * load.page_size,
            token_usage=load.kv_usage,
            gen_throughput=load.tokens_per_second,
            cache_hit_rate=_hit_rate(self._service),
            utilization=load.num_running / load.num_slots,
            max_running_requests=load.num_slots,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[one]
        )

    @reports_errors
    async def GetTokenizer(self, request: Any, context: _Context) -> None:
        service = self._service
        data = await asyncio.to_thread(archive, service.tokenizer, Path(service.identity.path))
        for chunk in chunks(data):
            await context.write(chunk)

    @reports_errors
    async def FlushCache(
        self, request: common_pb.FlushCacheRequest, context: _Context
    ) -> common_pb.FlushCacheResponse:
        """At once, whatever the request's patience: open requests keep what they stand on."""
        scope = flushed_scope(identify_caller(context, self._tenants).tenant)
        num_pages = await self._service.clear_prefix_cache(scope)
        return common_pb.FlushCacheResponse(success=True, message=f"{num_pages} pages were forgotten")

    @reports_errors
    async def SubscribeKvEvents(self, request: common_pb.SubscribeKvEventsRequest, context: _Context) -> None:
        scope = CacheScope("tenant", identify_caller(context, self._tenants).tenant)
        writer = EventWriter(scope, sees_all=not self._tenants.asks_for_tokens)
        batches = kv_event_batches(self._service, request.start_sequence_number, writer)
        async with aclosing(batches):
            async for batch in batches:
                await context.write(batch)

    @reports_errors
    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> NoReturn:
        raise ServiceError(Status.UNIMPLEMENTED, "this server generates text; it makes no embeddings")

    @reports_errors
    async def StartProfile(self, request: Any, context: _Context) -> NoReturn:
        raise ServiceError(Status.UNIMPLEMENTED, "this server cannot be profiled over gRPC")

    @reports_errors
    async def StopProfile(self, request: Any, context: _Context) -> NoReturn:
        raise ServiceError(Status.UNIMPLEMENTED, "this server cannot be profiled over gRPC")


def _hit_rate(service: Service) -> float:
    """Share of the tokens looked up in the prefix cache that were found there."""
    prefixes = service.engine.snapshot().prefixes
    return prefixes.hit_tokens / prefixes.query_tokens if prefixes and prefixes.query_tokens else 0.0

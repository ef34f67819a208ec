"""Between the native protocol's messages and the service's own records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jaxserve.outputs import AnswerDelta, CompletionOutput, RequestOutput, TokenLogprobs
from jaxserve.plan import SamplingParams
from jaxserve.weights.generation_config import SAMPLING_DEFAULTS
from server.core import GenerateRequest, Receipt, ServiceError, Status
from server.grpc_server.caller import Caller
from server.grpc_server.grammars import read_native_grammar
from server.grpc_server.native_conversation import read_messages, read_variables
from server.proto.jaxserve.v1 import engine_pb2 as pb

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


def read_request(message: pb.GenerateRequest, caller: Caller) -> GenerateRequest:
    """A request as the service takes it. Raises ServiceError for parameters that are out of range."""
    cache = message.cache
    conversation = message.conversation if message.WhichOneof("prompt") == "conversation" else None
    return GenerateRequest(
        text=message.text if message.WhichOneof("prompt") == "text" else None,
        token_ids=list(message.token_ids.ids) if message.WhichOneof("prompt") == "token_ids" else None,
        messages=None if conversation is None else read_messages(conversation),
        template_variables={} if conversation is None else read_variables(conversation),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        params=read_params(message.params),
        absent=SAMPLING_DEFAULTS - {field.name for field, _ in message.params.ListFields()},
        request_id=message.request_id or None,
        model=message.model or None,
        tenant=caller.tenant,
        deadline=caller.deadline(message.deadline_seconds if message.HasField("deadline_seconds") else None),
        priority=message.priority_class or caller.priority,
        is_retry=message.is_retry or caller.is_retry,
        cache_namespace=cache.namespace if cache.HasField("namespace") else None,
        cache_read=cache.read if cache.HasField("read") else True,
        cache_write=cache.write if cache.HasField("write") else True,
        fallback_route=message.fallback_route,
        trace_parent=caller.trace.parent,
        trace_state=caller.trace.state,
    )


def read_params(message: pb.SamplingParams) -> SamplingParams:
    """The fields that are present, by the names they have in common; the library's defaults for the rest."""
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "allowed_token_ids" in fields:
        fields["allowed_token_ids"] = list(fields["allowed_token_ids"].ids)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "grammar" in fields:
        fields["grammar"] = read_native_grammar(fields["grammar"])
    for name in ("bad_token_ids", "stop_token_ids", "stop"):
        if name in fields:
            fields[name] = tuple(fields[name])
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise ServiceError(Status.INVALID_ARGUMENT, str(error)) from error


def write_deltas(batch: Sequence[AnswerDelta]) -> Iterator[pb.GenerateResponse]:
    """One message for each sample that something was added to."""
    merged: dict[int, pb.GenerateResponse] = {}
    for delta in batch:
        response = merged.get(delta.index)
        if response is None:
            response = merged[delta.index] = pb.GenerateResponse()
            response.delta.index = delta.index
        message = response.delta
        message.token_ids.extend(delta.token_ids)
        message.text += delta.text
        if delta.logprobs is not None:
            message.logprobs.extend(map(_position, delta.logprobs))
        if delta.prompt_logprobs is not None:
            message.prompt_logprobs.extend(map(_position, delta.prompt_logprobs))
    for response in merged.values():
        if response.delta.token_ids or response.delta.text:
            yield response


def write_samples(output: RequestOutput) -> Iterator[pb.Delta]:
    """Whole samples."""
    for sample in output.outputs:
        first = sample.index == 0
        yield pb.Delta(
            index=sample.index,
            token_ids=sample.token_ids,
            text=sample.text,
            logprobs=map(_position, sample.logprobs or ()),
            prompt_logprobs=map(_position, (output.prompt_logprobs or ()) if first else ()),
        )


def write_final(request_id: str, output: RequestOutput, receipt: Receipt) -> pb.Final:
    """The last message of a stream."""
    return pb.Final(
        request_id=request_id,
        samples=map(_sample_end, output.outputs),
        usage=pb.Usage(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=receipt.reused_tokens,
            completion_tokens=sum(len(sample.token_ids) for sample in output.outputs),
        ),
        timings=_timings(output),
        receipt=pb.Receipt(**asdict(receipt)),
    )


def _sample_end(sample: CompletionOutput) -> pb.SampleEnd:
    end = pb.SampleEnd(
        index=sample.index,
        finish_reason=_FINISH_REASONS[sample.finish_reason],
        completion_tokens=len(sample.token_ids),
        cumulative_logprob=sample.cumulative_logprob,
    )
    if isinstance(sample.stop_reason, str):
        end.stop_string = sample.stop_reason
    elif sample.stop_reason is not None:
        end.stop_token_id = sample.stop_reason
    return end


def _timings(output: RequestOutput) -> pb.Timings:
    metrics = output.metrics
    timings = pb.Timings(
        queue=metrics.queue_seconds, first_token=metrics.first_token_seconds, total=metrics.total_seconds
    )
    if metrics.first_token_time is not None and metrics.scheduled_time is not None:
        timings.prefill = metrics.first_token_time - metrics.scheduled_time
        longest = max(len(sample.token_ids) for sample in output.outputs)
        if longest > 1:
            timings.per_token = (metrics.finish_time - metrics.first_token_time) / (longest - 1)
    return timings


def _position(entries: TokenLogprobs | None) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        entries=(
            pb.TokenLogprob(
                token_id=token_id, logprob=entry.logprob, rank=entry.rank, text=entry.decoded_token or ""
            )
            for token_id, entry in (entries or {}).items()
        )
    )

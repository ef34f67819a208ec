"""Between the messages of vLLM's gRPC protocol and the service's own records.

Its fields mostly lack presence, and a zero stands for "not given", not for zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.outputs import AnswerDelta, CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from jaxserve.plan import SamplingParams
from jaxserve.weights.generation_config import SAMPLING_DEFAULTS
from server.core import GenerateRequest, ServiceError, Status
from server.grpc_server.caller import Caller
from server.grpc_server.grammars import read_vllm_grammar

_WITH_DEFAULT = ("top_p", "repetition_penalty", "n")
"""Zero is no possible value of these, so it is the default, 1."""
_PLAIN = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_WITH_PRESENCE = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
_UNSUPPORTED = {
    "kv_transfer_params": "prefill and decode on different servers",
    "kv_transfer_params_json": "prefill and decode on different servers",
    "mm_inputs": "images and video",
    "media_refs": "images and video",
}


def read_request(message: pb.GenerateRequest, caller: Caller) -> GenerateRequest:
    """A request as the service takes it, its prompt not yet truncated.

    Raises ServiceError for a parameter that is out of range, or a feature that this server does not have.
    """
    _check_supported(message)
    kind = message.WhichOneof("input")
    tokenized = message.tokenized if kind == "tokenized" else None
    return GenerateRequest(
        text=message.text if kind == "text" else (tokenized.original_text or None) if tokenized else None,
        token_ids=None if tokenized is None else list(tokenized.input_ids),
        params=read_params(message.sampling_params),
        absent=SAMPLING_DEFAULTS - {field.name for field, _ in message.sampling_params.ListFields()},
        until_full=not message.sampling_params.HasField("max_tokens"),
        request_id=message.request_id or None,
        tenant=caller.tenant,
        deadline=caller.deadline(None),
        priority=caller.priority,
        is_retry=caller.is_retry,
        trace_parent=caller.trace.parent,
        trace_state=caller.trace.state,
    )


def read_params(message: pb.SamplingParams) -> SamplingParams:
    """The sampling parameters. Raises ServiceError for one that is out of range."""
    fields: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    fields |= {name: getattr(message, name) or 1 for name in _WITH_DEFAULT}
    fields |= {name: getattr(message, name) for name in _WITH_PRESENCE if message.HasField(name)}
    try:
        return SamplingParams(
            **fields,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            logit_bias=dict(message.logit_bias) or None,
            grammar=read_vllm_grammar(message),
        )
    except ValueError as error:
        raise ServiceError(Status.INVALID_ARGUMENT, str(error)) from error


def truncate(token_ids: Sequence[int], message: pb.SamplingParams, max_model_len: int) -> Sequence[int]:
    """The prompt's last `truncate_prompt_tokens` ids, -1 standing for as many as a sequence can hold."""
    if not message.HasField("truncate_prompt_tokens"):
        return token_ids
    limit = message.truncate_prompt_tokens
    if limit == -1:
        limit = max_model_len - 1
    if limit < 1:
        raise ServiceError(
            Status.INVALID_ARGUMENT, f"truncate_prompt_tokens {limit} is out of range: -1, or from 1 up"
        )
    return token_ids[-limit:]


def _check_supported(message: pb.GenerateRequest) -> None:
    for name, what in _UNSUPPORTED.items():
        if message.HasField(name):
            raise ServiceError(Status.UNIMPLEMENTED, f"{name}: this server does not do {what}")
    if message.extra_mm_inputs:
        raise ServiceError(Status.UNIMPLEMENTED, "extra_mm_inputs: this server does not do images and video")
    if message.data_parallel_rank:
        raise ServiceError(
            Status.INVALID_ARGUMENT, f"data_parallel_rank {message.data_parallel_rank}: there is only rank 0"
        )


class ResponseWriter:
    """Writes the responses of one request, which count tokens as they go."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._params = params
        self._num_prompt = num_prompt_tokens
        self._num_completion: dict[int, int] = {}

    def chunks(
        self, batch: Sequence[AnswerDelta], prompt_ids: Sequence[int]
    ) -> Iterator[pb.GenerateResponse]:
        """One chunk for each sample that something was added to."""
        samples: dict[int, list[AnswerDelta]] = {}
        for delta in batch:
            if delta.token_ids:
                samples.setdefault(delta.index, []).append(delta)
        for index, deltas in samples.items():
            token_ids = [token for delta in deltas for token in delta.token_ids]
            count = self._num_completion[index] = self._num_completion.get(index, 0) + len(token_ids)
            logprobs = [at for delta in deltas for at in delta.logprobs or ()]
            first = deltas[0].prompt_logprobs
            response = pb.GenerateResponse()
            chunk = response.chunk  # Filled in place: a message that is given to another is copied.
            chunk.token_ids.extend(token_ids)
            chunk.prompt_tokens, chunk.completion_tokens, chunk.index = self._num_prompt, count, index
            if (output := self._output_logprobs(token_ids, logprobs)) is not None:
                chunk.output_logprobs.CopyFrom(output)
            if (scored := self._input_logprobs(prompt_ids, first)) is not None:
                chunk.input_logprobs.CopyFrom(scored)
            yield response

    def completes(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The end of each sample, with all of its tokens."""
        for sample in output.outputs:
            yield pb.GenerateResponse(complete=self._complete(sample, output))

    def _complete(self, sample: CompletionOutput, output: RequestOutput) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            prompt_tokens=self._num_prompt,
            completion_tokens=len(sample.token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=self._output_logprobs(sample.token_ids, sample.logprobs or ()),
            input_logprobs=self._input_logprobs(output.prompt_token_ids, output.prompt_logprobs),
            index=sample.index,
        )
        if isinstance(sample.stop_reason, str):
            complete.matched_stop_str = sample.stop_reason
        elif sample.stop_reason is not None:
            complete.matched_token_id = sample.stop_reason
        return complete

    def _output_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> pb.OutputLogProbs | None:
        if not logprobs:
            return None
        num_top = self._params.logprobs or 0
        return pb.OutputLogProbs(
            token_logprobs=[at[token].logprob for token, at in zip(token_ids, logprobs, strict=True)],
            token_ids=token_ids,
            top_logprobs=[_top(at, num_top) for at in logprobs],
        )

    def _input_logprobs(
        self, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None
    ) -> pb.InputLogProbs | None:
        if logprobs is None:
            return None
        num_top = self._params.prompt_logprobs or 0
        scored = prompt_ids[: len(logprobs)]  # Fewer than the prompt has, if the request was cut off.
        return pb.InputLogProbs(
            token_logprobs=[
                pb.InputTokenLogProb(value=None if at is None else at[token].logprob)
                for token, at in zip(scored, logprobs, strict=True)
            ],
            token_ids=scored,
            top_logprobs=[_top(at or {}, num_top) for at in logprobs],
        )


def _top(entries: Mapping[int, Logprob], num_top: int) -> pb.TopLogProbs:
    """The most likely tokens of a position, of which the one that stands there may be another."""
    best = sorted(entries.items(), key=lambda entry: entry[1].rank)[:num_top]
    return pb.TopLogProbs(values=[entry.logprob for _, entry in best], token_ids=[token for token, _ in best])

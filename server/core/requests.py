"""What a door hands to the service, and what is kept of a request that has ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import ServiceTerms
from jaxserve.text import Message
from server.core.errors import ServiceError, Status

DEFAULT_CLASS = "default"
"""The priority class of a request that names none."""
CachePath = Literal["off", "cold", "warm"]
"""Nothing was looked for, as there is no cache or the request wants none; nothing was found; some was."""
MAX_NAME_LEN = 256
"""Characters of a request id, of a tenant's name or of a namespace's."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt and how to answer it. Exactly one of text, token ids and messages is the prompt."""

    text: str | None = None
    """A text to encode; beside `token_ids` only the record of what they spell."""
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    """A conversation, for the model's chat template."""
    template_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the chat template, by name."""
    add_special_tokens: bool = True
    """Whether a text gets the tokens that the model expects around it, such as a beginning of sequence."""
    params: SamplingParams = field(default_factory=SamplingParams)
    until_full: bool = False
    """The answer may take whatever the longest sequence leaves, instead of `params.max_tokens`."""
    request_id: str | None = None
    """A name that none of the tenant's open requests has; by default a fresh one."""
    absent: frozenset[str] = frozenset()
    """Names of parameters that the client left out: the model's own defaults hold for them, if it has any."""
    model: str | None = None
    """The route that is to answer; by default the server's first."""
    tenant: str = ""
    """Whose request it is: shares, quotas and cached prefixes are a tenant's, and only it may abort it."""
    deadline: float | None = None
    """Seconds from now after which the answer is worth nothing."""
    priority: str = ""
    """A class of the policy; "" for "default"."""
    is_retry: bool = False
    """Its caller was refused before and tries again."""
    cache_namespace: str | None = None
    """Cached prefixes are shared with whoever names the same; None keeps them the tenant's own."""
    cache_read: bool = True
    """Whether it may start on pages that others computed."""
    cache_write: bool = True
    """Whether others may start on its pages."""
    fallback_route: str = ""
    """The one other route that may answer if the model's refuses, instead of those that the operator chose;
    the model's own name accepts no other."""
    trace_parent: str = ""
    """W3C trace context of the caller, for the log and for spans."""
    trace_state: str = ""
    """What vendors add to it."""

    @property
    def priority_class(self) -> str:
        """The class that it is served in."""
        return self.priority or DEFAULT_CLASS

    def terms(self, arrival: float) -> ServiceTerms:
        """What the scheduler is told of it, given when it came, in seconds of `time.monotonic`."""
        return ServiceTerms(
            tenant=self.tenant,
            priority=self.priority_class,
            deadline=None if self.deadline is None else arrival + self.deadline,
            is_retry=self.is_retry,
            namespace=self.cache_namespace,
            cache_read=self.cache_read,
            cache_write=self.cache_write,
        )

    def check(self) -> None:
        """Raise ServiceError for a request without one prompt, or on terms that make no sense."""
        text = self.text if self.token_ids is None else None
        if sum(prompt is not None for prompt in (text, self.token_ids, self.messages)) != 1:
            raise ServiceError(
                Status.INVALID_ARGUMENT, "a request needs exactly one of text, token ids and messages"
            )
        names = {
            "request_id": self.request_id or "",
            "tenant": self.tenant,
            "cache namespace": self.cache_namespace or "",
        }
        for name, value in names.items():
            if len(value) > MAX_NAME_LEN:
                raise ServiceError(
                    Status.INVALID_ARGUMENT,
                    f"{name} has {len(value)} characters; the limit is {MAX_NAME_LEN}",
                )
        if self.deadline is not None and math.isnan(self.deadline):
            raise ServiceError(Status.INVALID_ARGUMENT, "the deadline is not a number of seconds")
        if self.deadline is not None and self.deadline <= 0:
            raise ServiceError(
                Status.DEADLINE_EXCEEDED, f"the deadline, {self.deadline:.3f} s from now, has passed"
            )
        if self.cache_namespace == "":
            raise ServiceError(Status.INVALID_ARGUMENT, "the cache namespace has no name")

    @property
    def names_token_ids(self) -> bool:
        """Whether it means another thing to a model with another tokenizer."""
        params = self.params
        named = (params.logit_bias, params.allowed_token_ids, params.bad_token_ids, params.stop_token_ids)
        return self.token_ids is not None or any(named)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which route answers a request, and why that one."""

    route: str
    reason: str
    """"requested", "default", or what made another route refuse: "overflow of chat: ..."."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """How an answer came about: enough to explain it, and with its seed to have it again."""

    route: str
    """The name that the model goes by here."""
    route_reason: str
    """Why this one: see `Choice`."""
    model: str
    """The model's own name."""
    model_fingerprint: str
    tokenizer_fingerprint: str
    precision: str
    kv_format: str
    reused_tokens: int
    """Prompt tokens whose keys and values were found in a cache."""
    cache_path: CachePath
    """Where they were looked for, and whether there were any."""
    cache_namespace: str
    """The one that was named; "" for the tenant's own."""
    tenant: str
    priority_class: str
    """The class that it was served in: a retry's may be another than it asked for."""
    decoding: str
    """"greedy" or "sampled"."""
    drafter: str
    """What drafted the answer; "" where nothing does on this route."""
    drafting_state: str
    """How drafting stood on this route at the answer's end: "drafting", "measuring" while plain steps are
    timed, "no_drafts" or "does_not_pay" while it rests; "" where nothing drafts."""
    drafted_tokens: int
    accepted_tokens: int
    """Of the drafted, the ones that became part of the answer."""
    accepted_length: float
    """Tokens that a verification of drafts brought on average; 0 where there was none."""
    drafting_saved_seconds: float
    """By which drafts made the answer come sooner than plain steps would have, by measured step times; below
    0 later."""
    seed: int
    engine_version: str
    manifest: str = ""
    """The hash of all that can change an answer or its speed: see `jaxserve.run_manifest`."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request that has ended or was refused, for logs and metrics. Times are of `time.monotonic`."""

    request: GenerateRequest
    request_id: str
    """"" for one that was refused before it had a name."""
    admitted: bool
    arrival_time: float
    first_token_time: float | None
    """When its door took the first token."""
    end_time: float
    num_prompt_tokens: int
    """0 for a request that was refused: its prompt may not even have been read."""
    num_streamed: int
    """Tokens that its door has taken, over all samples."""
    output: RequestOutput | None
    """None where the stream ended early."""
    error: ServiceError | None
    """None where there is an output."""
    receipt: Receipt | None
    """With the output."""

    @property
    def outcome(self) -> str:
        """The finish reason of the first sample, or the status of the error."""
        if self.output is not None:
            return self.output.outputs[0].finish_reason
        assert self.error is not None, "a request ends with an output or an error"
        return self.error.status.value

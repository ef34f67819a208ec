"""From a call to what the service is asked: one request for each of its prompts."""

from __future__ import annotations

from dataclasses import replace

from server.core import GenerateRequest
from server.core.trace import TraceContext
from server.http.requests import Call, ChatPrompt, PromptInput, TextPrompt
from server.http.terms import CallTerms

_NO_TRACE = TraceContext("", "")


def generate_requests(
    call: Call, terms: CallTerms, name: str, *, tenant: str = "", trace: TraceContext = _NO_TRACE
) -> list[GenerateRequest]:
    """Requests whose ids are the call's `name` and a number, for a tenant and within a caller's trace."""
    common = GenerateRequest(
        params=call.params,
        absent=terms.absent,
        until_full=call.until_full,
        model=call.model,
        fallback_route=terms.fallback_route,
        priority=terms.priority,
        is_retry=terms.is_retry,
        deadline=terms.deadline,
        cache_namespace=terms.cache_namespace,
        cache_read=terms.cache_read,
        cache_write=terms.cache_write,
        tenant=tenant,
        trace_parent=trace.parent,
        trace_state=trace.state,
    )
    return [
        _with_prompt(replace(common, request_id=f"{name}-{index}"), prompt)
        for index, prompt in enumerate(call.prompts)
    ]


def _with_prompt(asked: GenerateRequest, prompt: PromptInput) -> GenerateRequest:
    match prompt:
        case ChatPrompt(messages, variables):
            return replace(asked, messages=messages, template_variables=variables)
        case TextPrompt(text, add_special_tokens):
            return replace(asked, text=text, add_special_tokens=add_special_tokens)
        case _:
            return replace(asked, token_ids=prompt.token_ids)

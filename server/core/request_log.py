"""One structured line for each request that has ended."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from server.core.requests import RequestRecord

_log = logging.getLogger("jaxserve.server.requests")


def log_request(record: RequestRecord) -> None:
    """Write a request's line, a JSON object, at level INFO: its end, counts, times, and receipt."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", json.dumps(describe(record)))


def describe(record: RequestRecord) -> dict[str, Any]:
    """What the line holds; neither prompt nor answer is in it."""
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": record.request.tenant,
        "prompt_tokens": record.num_prompt_tokens,
    }
    if record.request.trace_parent:
        line["trace_parent"] = record.request.trace_parent
    if record.error is not None:
        line |= {"status": record.error.status.value, "error": record.error.message}
    if record.output is not None:
        metrics = record.output.metrics
        line |= {
            "status": "ok",
            "finish_reasons": [sample.finish_reason for sample in record.output.outputs],
            "completion_tokens": sum(len(sample.token_ids) for sample in record.output.outputs),
            "queue_seconds": metrics.queue_seconds,
            "first_token_seconds": metrics.first_token_seconds,
            "total_seconds": metrics.total_seconds,
            "preemptions": metrics.num_preemptions,
        }
    if record.receipt is not None:
        line["receipt"] = asdict(record.receipt)
    return line

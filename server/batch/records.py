"""The lines of an answer file, in OpenAI's format: `{id, custom_id, response, error}`.

What a door would have answered, an error of the request's included, is the response, with its status; what
never was a request has no response, and says why as `error`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from server.batch.errors import LineError
from server.batch.lines import InputLine
from server.http.errors import ApiError

Json = dict[str, Any]

_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})-([0-9a-f]{16})")
_KEYS = {"id", "custom_id", "response", "error"}


def answered(line: InputLine, custom_id: str, request_id: str, body: Json) -> Json:
    return _record(line, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refused(line: InputLine, custom_id: str, request_id: str, error: ApiError) -> Json:
    """The record of a request that gets an error for an answer."""
    response = {"status_code": error.status, "request_id": request_id, "body": error.body()}
    return _record(line, custom_id, response, None)


def unusable(line: InputLine, error: LineError) -> Json:
    """The record of a line that is no request."""
    shown = {"code": error.code, "message": f"line {line.number}: {error.message}"}
    return _record(line, error.custom_id, None, shown)


def _record(line: InputLine, custom_id: str | None, response: Json | None, error: Json | None) -> Json:
    return {"id": line.record_id, "custom_id": custom_id, "response": response, "error": error}


@dataclass(frozen=True)
class RecordHead:
    """Which line a record answers, and whether it is an answer."""

    number: int
    digest: str
    """See `InputLine`."""
    failed: bool


def head_of(record: Any) -> RecordHead:
    """The head of a record that was written here. Raises ValueError for anything else."""
    if not isinstance(record, dict) or record.keys() != _KEYS:
        raise ValueError("it is no record of a batch")
    match = _ID.fullmatch(record["id"]) if isinstance(record["id"], str) else None
    if match is None:
        raise ValueError(f"its id is {record['id']!r}, which `jaxserve batch` has not written")
    return RecordHead(int(match[1]), match[2], is_failure(record))


def is_failure(record: Json) -> bool:
    """Whether a record says that its line got no answer."""
    return record["response"] is None or record["response"]["status_code"] != 200


def as_line(record: Json) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"

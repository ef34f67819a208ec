"""JSON as a client may send it: one object, and nothing that is not JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from server.http.errors import bad_request
from server.http.fields import shown

MAX_DEPTH = 32
"""Objects and lists inside one another: no parameter needs more, and no template must meet it."""


def parse_object(data: bytes, what: str = "the body") -> dict[str, Any]:
    """The object that these bytes are; `what` they are, for messages.

    Raises ApiError (400) for what is no JSON object. NaN, infinities and unpaired surrogates are none either.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise bad_request(f"{what} is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"{what} is not valid UTF-8: byte {error.start}") from None
    except UnicodeEncodeError:
        raise bad_request(f"{what} has an unpaired surrogate, which is not a character") from None
    except RecursionError:
        raise bad_request(f"{what} is nested too deeply; the limit is {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise bad_request(f"{what} is not acceptable JSON: {error}") from None
    _check_depth(value, what)
    if not isinstance(value, dict):
        raise bad_request(f"{what} is {shown(value)}; expected an object")
    return value


def _check_depth(value: object, what: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [child for group in children for child in group if isinstance(child, dict | list)]
        if not level:
            return
    raise bad_request(f"{what} is nested too deeply; the limit is {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

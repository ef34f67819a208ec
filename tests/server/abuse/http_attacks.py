"""What may come to the HTTP door."""

from __future__ import annotations

import random

from tests.server.abuse.bodies import LARGEST_BODY, PATHS, encoded, hostile_body, spoilt
from tests.server.abuse.sockets import Attack, exchange

_CHUNKS = (b"5\r\nhello\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n\r\n", b"zz\r\n", b"0\r\n\r\n")
_ENDLESS = {"prompt": "hello", "max_tokens": 120, "ignore_eos": True, "stream": True}


async def attack_http(host: str, port: int, noise: random.Random) -> str:
    """One call in some wrong way; how the server took it: a status code, or "" where it said nothing.

    Raises AssertionError for an answer that shows what is inside.
    """
    attack = _choose(noise)
    answer = await exchange(host, port, attack, noise)
    for trace in (b"Traceback", b'File "', b".py"):
        assert trace not in answer, f"to {attack.data[:500]!r}: {answer!r}"
    if attack.complete and attack.leave_after is None:
        assert answer.startswith(b"HTTP/1.1 "), f"to {attack.data[:500]!r}: {answer!r}"
    return answer[9:12].decode("latin-1")


def _choose(noise: random.Random) -> Attack:
    kinds = (_body, _body, _body, _cancel, _framing, _truncated, _head, _noise, _smuggled)
    if noise.random() < 0.002:
        return _oversized(noise)
    return noise.choice(kinds)(noise)


def request(
    path: str, body: bytes, *, method: str = "POST", kind: str = "application/json", extra: str = ""
) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n{extra}\r\n"
    )
    return head.encode("latin-1") + body


def _body(noise: random.Random) -> Attack:
    path = noise.choice(PATHS)
    return Attack(request(path, hostile_body(noise, path)), complete=True)


def _cancel(noise: random.Random) -> Attack:
    """A long answer, of which little is read; at times by a client that can only listen."""
    data = request("/v1/completions", encoded(_ENDLESS | {"n": noise.randrange(1, 5)}))
    return Attack(data, complete=True, leave_after=noise.randrange(1, 3000), half_close=noise.random() < 0.3)


def _framing(noise: random.Random) -> Attack:
    """A head that does not go with its body, or with anything."""
    path = noise.choice((*PATHS, "/", "/nowhere", "/v1/models/%00", "/" + "a" * noise.randrange(9000)))
    method = noise.choice(("POST", "GET", "PUT", "DELETE", "OPTIONS", "BREW"))
    kind = noise.choice(("application/json", "text/plain", "", "application/json; charset=klingon", "a/b/c"))
    return Attack(request(path, b"{}", method=method, kind=kind), complete=True)


def _truncated(noise: random.Random) -> Attack:
    """Less than was promised, and then nothing or the end."""
    data = request("/v1/completions", encoded(_ENDLESS))
    return Attack(data[: noise.randrange(1, len(data))], complete=False, half_close=noise.random() < 0.5)


def _head(noise: random.Random) -> Attack:
    """Headers without end, or with bytes that are none of theirs."""
    name = noise.choice(("x-a", "authorization", "traceparent", "cookie", "x-request-id", "content-length"))
    value = noise.choice(("y" * noise.randrange(100_000), "\x00", "\xff\xfe", "1, 2", "-5", "00-" + "f" * 32))
    extra = f"{name}: {value}\r\n" * noise.choice((1, 1, 300))
    return Attack(request("/v1/completions", encoded(_ENDLESS), extra=extra), complete=False)


def _noise(noise: random.Random) -> Attack:
    whole = request("/v1/chat/completions", b'{"messages": []}')
    data = noise.randbytes(noise.randrange(1, 400)) if noise.random() < 0.5 else spoilt(noise, whole)
    return Attack(data, complete=False, half_close=noise.random() < 0.3)


def _smuggled(noise: random.Random) -> Attack:
    """Two lengths for one body, chunks that are none, one request inside another."""
    inner = request("/v1/completions", encoded(_ENDLESS))
    chunks = noise.choice(
        (b"5\r\nhello\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n\r\n", b"zz\r\n", b"0\r\n\r\n")
    )
    extra = noise.choice(("transfer-encoding: chunked\r\n", "transfer-encoding: gzip, chunked\r\n", ""))
    return Attack(request("/tokenize", chunks, extra=extra) + inner, complete=False)


def _oversized(noise: random.Random) -> Attack:
    size = LARGEST_BODY + noise.randrange(1, 2**20)
    return Attack(request("/v1/completions", b'{"prompt": "' + b"a" * size), complete=True)

"""A server that answers completions as a test says, which need not be as it should."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
Page = Callable[[], str]


def good_events(body: Json) -> list[str]:
    """What a server should stream: a piece for each token, then the usage."""
    pieces = [json.dumps({"choices": [{"text": "a"}]})] * body["max_tokens"]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    return [*pieces, json.dumps({"choices": [], "usage": usage})]


class OtherServer:
    """What a test may change, while it runs too."""

    def __init__(self) -> None:
        self.events: Callable[[Json], Sequence[str]] = good_events
        """The data of the events that answer a request's body."""
        self.pages: dict[str, Page] = {"/v1/models": lambda: json.dumps({"data": [{"id": "other"}]})}
        self.url = ""
        self._released = threading.Event()

    def hang(self) -> str:
        """A page that does not come before the test's end."""
        self._released.wait(30)
        return ""

    def release(self) -> None:
        self._released.set()


@contextmanager
def other_server() -> Iterator[OtherServer]:
    told = OtherServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = told.pages.get(self.path)
            self._answer(404 if page is None else 200, "" if page is None else page())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(200, "".join(f"data: {event}\n\n" for event in told.events(body)))

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, text: str) -> None:
            try:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:  # The client has left.
                self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield told
        finally:
            told.release()
            server.shutdown()
            thread.join()

"""Ports to listen on, and a sentence where one cannot be had."""

from __future__ import annotations

import errno
import socket

_REASONS = {
    errno.EADDRINUSE: "the port is in use; choose another one, or 0 for a free one",
    errno.EACCES: "the port is reserved for the system; choose one from 1024 up, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
}


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens; port 0 takes a free one. Raises ValueError if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ValueError(f"cannot listen on {where}: {reason}") from error


def check_free(host: str, port: int) -> None:
    """Raise ValueError if a port cannot be had now: for those who open it themselves and complain worse."""
    listen(host, port).close()

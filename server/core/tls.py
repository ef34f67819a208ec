"""Where a server's certificates lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of a server."""

    certificate: Path
    """The server's certificate chain."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """If given, clients must show a certificate that one of these authorities has signed."""

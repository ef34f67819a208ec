"""Certificates from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of a server."""

    certificate: Path
    """The server's certificate chain."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """If given, clients must show a certificate that one of these authorities has signed."""

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port. Raises OSError for a file that cannot be read."""
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], self.client_ca.read_bytes(), require_client_auth=True)

"""The gRPC door: the native service, vLLM's, health and reflection, on one port."""

from server.grpc_server.door import GrpcDoor, GrpcOptions
from server.grpc_server.tls import TlsFiles

__all__ = ["GrpcDoor", "GrpcOptions", "TlsFiles"]

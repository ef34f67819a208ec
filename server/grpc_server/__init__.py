"""The gRPC door: the native service, vLLM's, health and reflection, on one port."""

from server.grpc_server.door import GrpcDoor, GrpcOptions

__all__ = ["GrpcDoor", "GrpcOptions"]

"""The gRPC server and its HTTP door."""

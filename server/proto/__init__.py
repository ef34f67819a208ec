"""The native interface, and the code generated from it: `python -m server.proto.generate`."""

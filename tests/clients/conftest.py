"""These tests need the `server` extra."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("grpc") and find_spec("smg_grpc_proto") else ["test_*.py"]

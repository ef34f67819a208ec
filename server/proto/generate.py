"""Regenerates the checked-in code of the native protocol: `python -m server.proto.generate`.

Needs grpcio-tools in the version named by TOOLS_VERSION, as another one writes other code.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

TOOLS_VERSION = "1.85.1"
PROTO = "server/proto/jaxserve/v1/engine.proto"
GENERATED = tuple(PROTO.replace(".proto", suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"))
"""What is written, relative to the repository."""

_ROOT = Path(__file__).resolve().parents[2]


def generate(target: Path) -> None:
    """Write the generated files below `target`, at the paths that they have in the repository.

    Raises RuntimeError for another version of the tools, or if the protocol has an error.
    """
    found = importlib.metadata.version("grpcio-tools")
    if found != TOOLS_VERSION:
        raise RuntimeError(f"grpcio-tools is {found}; the checked-in code is made by {TOOLS_VERSION}")
    from grpc_tools import protoc

    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    includes = [f"-I{_ROOT}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    # The path from the repository's root makes the generated imports begin with `server.`.
    if protoc.main(["protoc", *includes, *outputs, PROTO]):
        raise RuntimeError(f"protoc refused {PROTO}: see its message above")


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        for name in GENERATED:
            (_ROOT / name).write_bytes((Path(scratch) / name).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())

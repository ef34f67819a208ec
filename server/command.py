"""`jaxserve serve`: a model behind gRPC, and HTTP beside it."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, shows_status
from jaxserve.commands.options import add_engine_arguments, read_engine_settings

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.build import EngineOptions
    from jaxserve.opened_model import OpenedModel
    from server.core import ModelIdentity, Service
    from server.core.tls import TlsFiles
    from server.process import Door

DEFAULT_GRPC_PORT = 50051

_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "smg_grpc_proto", "starlette", "uvicorn")
"""Of the `server` extra."""

_DESCRIPTION = """Serves a model over gRPC (jaxserve.v1.Engine and vllm.grpc.engine.VllmEngine, with health
and reflection) and, with --http-port, over HTTP as OpenAI does. Without certificates and tokens it listens on
the loopback only. SIGTERM or Ctrl-C lets running requests end; a second one does not."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the doors are, and who may come in."""

    host: str
    tls: TlsFiles | None
    tokens: Mapping[str, str] | None
    """The tenant of each bearer token; None asks nobody for one."""

    def __post_init__(self) -> None:
        if not (self.guarded or self.on_loopback):
            raise ValueError(
                f"host {self.host!r} is not the loopback: other machines need --tls-cert and --tls-key, "
                "--tokens, or both"
            )

    @property
    def guarded(self) -> bool:
        return self.tls is not None or self.tokens is not None

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Serve:
    name = "serve"
    help = "serve a model over gRPC and HTTP"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        add = parser.add_argument
        add("model", metavar="MODEL", help="a catalogue name, a folder, a .gguf file or a hub id")
        add("--name", metavar="NAME", help="what requests call the model (default: as MODEL says)")
        add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default %(default)s)")
        add(
            "--grpc-port",
            type=_port,
            default=DEFAULT_GRPC_PORT,
            metavar="N",
            help="0 takes a free one (default %(default)s)",
        )
        add("--http-port", type=_port, metavar="N", help="also serve HTTP; 0 takes a free port")
        add("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain of the server")
        add("--tls-key", type=Path, metavar="FILE", help="its PEM private key")
        add(
            "--tls-client-ca", type=Path, metavar="FILE", help="ask clients for a certificate signed by these"
        )
        add("--tokens", type=Path, metavar="FILE", help="let in bearer tokens: lines of TENANT TOKEN")
        add("--num-slots", type=int, metavar="N", help="sequences that run at once (default: by machine)")
        add("--max-waiting", type=int, default=1024, metavar="N", help="longest queue (default %(default)s)")
        add(
            "--drain-seconds",
            type=float,
            default=30.0,
            metavar="S",
            help="for running requests to end after SIGTERM (default %(default)s)",
        )
        add_verbose_argument(parser)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        if any(find_spec(package) is None for package in _PACKAGES):
            raise ValueError("serving needs the extra `server`: in the checkout, pip install -e '.[server]'")
        access = read_access(args)
        if args.max_waiting < 0:
            raise ValueError(f"--max-waiting {args.max_waiting} is negative")
        if not args.drain_seconds >= 0:
            raise ValueError(f"--drain-seconds {args.drain_seconds} is not a number from 0 up")
        from jaxserve.engine.build import EngineOptions
        from jaxserve.opened_model import open_model

        options = EngineOptions(**read_engine_settings(args, num_slots=args.num_slots))
        model = open_model(args.model, progress=shows_status(args))
        return _serve(args, access, model, options)


def read_access(args: argparse.Namespace) -> Access:
    """Who may come in. Raises ValueError for files that do not go together, or an open door to the world."""
    from server.core.tenants import read_tokens
    from server.core.tls import TlsFiles

    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
    tls = None
    if args.tls_cert is not None:
        tls = TlsFiles(certificate=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca)
    return Access(host=args.host, tls=tls, tokens=None if args.tokens is None else read_tokens(args.tokens))


def model_name(argument: str) -> str:
    """What requests call a model, unless the operator says otherwise: a path's last part, or the name."""
    path = Path(argument)
    if not path.exists():
        return argument
    return path.resolve().name.removesuffix(".gguf")


def _serve(args: argparse.Namespace, access: Access, model: OpenedModel, options: EngineOptions) -> int:
    import jax

    from jaxserve.async_engine import Engine
    from jaxserve.opened_model import make_loop
    from server.core import Service, identify
    from server.process import serve

    device = model.build_engine(options, progress=shows_status(args))
    identity = identify(args.name or model_name(args.model), model, device.config, jax.default_backend())

    async def main() -> int:
        engine = Engine(make_loop(device, model.tokenizer))
        service = Service(identity, model.tokenizer, engine, max_waiting=args.max_waiting)

        def announce(addresses: Sequence[str]) -> None:
            for line in (*_address_lines(addresses, access), *describe(identity, device.config)):
                print(line, flush=True)

        return await serve(
            service,
            _doors(args, access, service),
            drain_seconds=args.drain_seconds,
            announce=announce,
        )

    return asyncio.run(main())


def _doors(args: argparse.Namespace, access: Access, service: Service) -> list[Door]:
    from server.grpc_server import GrpcDoor, GrpcOptions

    options = GrpcOptions(host=access.host, port=args.grpc_port, tls=access.tls, tokens=access.tokens)
    doors: list[Door] = [GrpcDoor(service, options)]
    if args.http_port is not None:
        from server.http_door import HttpDoor

        doors.append(
            HttpDoor(service, host=access.host, port=args.http_port, tls=access.tls, tokens=access.tokens)
        )
    return doors


def _address_lines(addresses: Sequence[str], access: Access) -> list[str]:
    kinds = ("grpc", "http")
    lines = [f"{kind:<10}{address}" for kind, address in zip(kinds, addresses, strict=False)]
    if not access.guarded:
        lines.append(f"{'access':<10}this machine only, as neither --tls-cert nor --tokens is given")
    return lines


def describe(identity: ModelIdentity, config: EngineConfig) -> list[str]:
    """What was chosen for a model, a line for each thing."""
    cache = config.cache
    pages = " + ".join(str(count - 1) for count in cache.num_pages)
    decode, chunk = (" ".join(map(str, rungs)) for rungs in (config.decode_rows, config.chunk_rows))
    return [
        f"{'model':<10}{identity.name} ({identity.family}, {identity.fingerprint})",
        f"{'device':<10}{identity.device}",
        f"{'precision':<10}{identity.precision}, KV pool in {identity.kv_format}",
        f"{'pages':<10}{pages} of {cache.page_size} tokens, for {config.num_slots} sequences of up to "
        f"{config.max_model_len} tokens",
        f"{'ladder':<10}decode {decode}, chunk {chunk}",
    ]


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected a number from 0 to 65535")
    return int(text)


SERVE = Serve()
"""The entry point."""

"""`jaxserve serve`: models behind gRPC, and HTTP beside it."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, say, shows_status
from jaxserve.commands.options import add_engine_arguments, read_engine_settings
from jaxserve.commands.processes import add_process_arguments, follows, join_processes
from jaxserve.interrupts import interrupts_deferred, leave_at_once
from server.route_arguments import RouteArguments, read_routes
from server.telemetry_arguments import add_telemetry_arguments, read_outlets, read_statistics

if TYPE_CHECKING:
    from server.core import Routes
    from server.core.tls import TlsFiles
    from server.process import Door
    from sharding.processes import Job

DEFAULT_GRPC_PORT = 50051
TOOL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral")
"""As `server.http.tool_speech` has them, which help need not import."""

_PACKAGES = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "llguidance",
    "prometheus_client",
    "smg_grpc_proto",
    "starlette",
    "uvicorn",
)
"""Of the `server` extra."""

_DESCRIPTION = """Serves models over gRPC (jaxserve.v1.Engine and vllm.grpc.engine.VllmEngine, with health and
reflection) and, with --http-port, over HTTP as OpenAI does. Requests name a route, which is a model, or one
of several precisions of it; the first answers those that name none. The ports are open at once, and answer
"unavailable" until the models are loaded. Without certificates and tokens it listens on the loopback only.
SIGTERM or Ctrl-C lets running requests end; a second one does not."""
_ORIGIN_HELP = "web origin whose pages may ask over HTTP, * for all; may be repeated (default: none)"
_ROUTE_HELP = """another model, or the same one otherwise, as chat=smollm2-135m,fallback=chat-int8: KEY is
dtype, quantize, kv, kv_memory, host_kv_memory, slots, max_model_len, max_chunk, deterministic, speculative,
draft_quantize, mesh (tensor=4+expert=2), prefill_mesh, policy, max_waiting, prefix_cache, generation_config
or fallback, the route that answers what this one has no room for; may be repeated"""

_POLICY_HELP = """scheduler policy, a .toml or .json file: priority classes with their shares, floors, targets
and queue limits, quotas of tenants, the budget of retries (default: interactive, default and batch); or what
--manifest has written, to serve with that policy, and to be refused unless all else is as it says, too"""
_MANIFEST_HELP = """write down all that can change an answer or its speed, for --policy; receipts have its
hash"""


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
    help = "serve models over gRPC and HTTP"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        add = parser.add_argument
        add("models", metavar="MODEL", nargs="*", help="a catalogue name, a folder, a .gguf file or a hub id")
        add("--route", action="append", default=[], metavar="NAME=MODEL[,KEY=VALUE...]", help=_ROUTE_HELP)
        add("--name", metavar="NAME", help="what requests call a single MODEL (default: as MODEL says)")
        add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default %(default)s)")
        add(
            "--grpc-port",
            type=_port,
            default=DEFAULT_GRPC_PORT,
            metavar="N",
            help="0 takes a free one (default %(default)s)",
        )
        add("--http-port", type=_port, metavar="N", help="also serve HTTP; 0 takes a free port")
        add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=_ORIGIN_HELP)
        add_answer_arguments(parser)
        add("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain of the server")
        add("--tls-key", type=Path, metavar="FILE", help="its PEM private key")
        add(
            "--tls-client-ca", type=Path, metavar="FILE", help="ask clients for a certificate signed by these"
        )
        add("--tokens", type=Path, metavar="FILE", help="let in bearer tokens: lines of TENANT TOKEN")
        add("--num-slots", type=int, metavar="N", help="sequences that run at once (default: by machine)")
        add("--policy", type=Path, metavar="FILE", help=_POLICY_HELP)
        add("--manifest", type=Path, metavar="FILE", help=_MANIFEST_HELP)
        add(
            "--max-waiting",
            type=int,
            metavar="N",
            help="requests of all classes that may wait (default: as the policy says, class by class)",
        )
        add(
            "--drain-seconds",
            type=float,
            default=30.0,
            metavar="S",
            help="for running requests to end after SIGTERM (default %(default)s)",
        )
        add_telemetry_arguments(parser)
        add_verbose_argument(parser)
        add_engine_arguments(parser)
        add_process_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        if any(find_spec(package) is None for package in _PACKAGES):
            raise ValueError("serving needs the extra `server`: in the checkout, pip install -e '.[server]'")
        access = read_access(args)
        if not args.drain_seconds >= 0:
            raise ValueError(f"--drain-seconds {args.drain_seconds} is not a number from 0 up")
        if args.allow_origin and args.http_port is None:
            raise ValueError("--allow-origin is about HTTP: it needs --http-port")
        routes = read_route_arguments(args)
        job = join_processes(args)
        if job is not None and len(routes) > 1:
            raise ValueError(f"{len(routes)} routes with {job.place.num_processes} processes: they serve one")
        return _follow(args, routes) if follows(job) else _serve(args, access, routes, job)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """What any command takes that answers requests as the doors do."""
    add = parser.add_argument
    add(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="how models write tool calls; auto goes by the chat template (default %(default)s)",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt anew, also where an earlier one began alike",
    )
    add(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="where a request leaves a sampling parameter out: auto takes what the model's own "
        "generation_config.json says, none the library's defaults (default %(default)s)",
    )


def read_route_arguments(args: argparse.Namespace) -> list[RouteArguments]:
    """Every route that the arguments declare. Raises ValueError for one that is malformed."""
    if args.max_waiting is not None and args.max_waiting < 0:
        raise ValueError(f"--max-waiting {args.max_waiting} is negative")
    common = RouteArguments(
        name="common",
        model="",
        max_waiting=args.max_waiting,
        policy_file=args.policy,
        prefix_cache=args.prefix_cache,
        generation_config=args.generation_config,
        settings=dict(read_engine_settings(args, num_slots=args.num_slots)),
    )
    return read_routes(args.models, args.route, args.name, common)


def read_access(args: argparse.Namespace) -> Access:
    """Who may come in. Raises ValueError for files that do not go together, or an open door to the world."""
    from jaxserve.bearer_tokens import read_tokens
    from server.core.tls import TlsFiles

    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
    tls = None
    if args.tls_cert is not None:
        tls = TlsFiles(certificate=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca)
    return Access(host=args.host, tls=tls, tokens=None if args.tokens is None else read_tokens(args.tokens))


def _follow(args: argparse.Namespace, declared: Sequence[RouteArguments]) -> int:
    """Load what the leader loads, and do as it says until it ends."""
    from server.loading import ModelLoader

    for _ in ModelLoader(declared, read_statistics(args), progress=False):
        raise AssertionError("a process that follows serves nothing itself")
    return 0


def _serve(
    args: argparse.Namespace, access: Access, declared: Sequence[RouteArguments], job: Job | None
) -> int:
    with interrupts_deferred():  # An extension module that is broken off in the middle may crash.
        import server.grpc_server
        import server.http_door  # noqa: F401
        from server.core import Routes
        from server.core.telemetry.outlets import Outlets
        from server.loading import ModelLoader
        from server.process import serve

    loader = ModelLoader(
        declared, read_statistics(args), progress=shows_status(args), manifest_file=args.manifest
    )
    outlets = Outlets(read_outlets(args))

    async def main() -> int:
        routes = Routes({route.name: route.fallback for route in declared})
        routes.watch(lambda service: service.observers.extend(outlets.observers))

        def on_open(addresses: Sequence[str]) -> None:
            say(f"loading {', '.join(routes.names)}; until then {' and '.join(addresses)} answer unavailable")

        def announce(addresses: Sequence[str]) -> None:
            for line in (*_address_lines(addresses, access), *loader.lines, "ready"):
                print(line, flush=True)

        return await serve(
            routes,
            _doors(args, access, routes),
            loading=loader,
            drain_seconds=args.drain_seconds,
            on_open=on_open,
            announce=announce,
        )

    with closing(outlets):
        status = asyncio.run(main())
    if loader.running or (job is not None and status):
        leave_at_once(status)
    return status


def _doors(args: argparse.Namespace, access: Access, routes: Routes) -> list[Door]:
    from server.grpc_server import GrpcDoor, GrpcOptions

    options = GrpcOptions(host=access.host, port=args.grpc_port, tls=access.tls, tokens=access.tokens)
    doors: list[Door] = [GrpcDoor(routes, options)]
    if args.http_port is not None:
        from server.http_door import HttpDoor

        doors.append(
            HttpDoor(
                routes,
                host=access.host,
                port=args.http_port,
                tls=access.tls,
                tokens=access.tokens,
                allow_origins=args.allow_origin,
                tool_parser=args.tool_parser,
            )
        )
    return doors


def _address_lines(addresses: Sequence[str], access: Access) -> list[str]:
    kinds = ("grpc", "http")
    lines = [f"{kind:<10}{address}" for kind, address in zip(kinds, addresses, strict=False)]
    if not access.guarded:
        lines.append(f"{'access':<10}this machine only, as neither --tls-cert nor --tokens is given")
    return lines


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected a number from 0 to 65535")
    return int(text)


SERVE = Serve()
"""The entry point."""

"""The arguments of `jaxserve serve` about what is measured and where it goes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.core.statistics import StatisticsOptions
    from server.core.telemetry.outlets import OutletOptions

_LOG_HELP = """where to append a JSON line for each request, with its receipt and without its text: a file, -
for standard error, or off (default %(default)s)"""
_OTLP_HELP = """collector of OpenTelemetry spans, such as http://localhost:4317; it needs the extra `otel`
(default: what OTEL_EXPORTER_OTLP_ENDPOINT says)"""
_GOODPUT_HELP = """what counts as good in every class, in milliseconds, such as ttft:500,tpot:50 (default:
what the classes aim at)"""


def add_telemetry_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--request-log", default="-", metavar="FILE", help=_LOG_HELP)
    add("--otlp-endpoint", metavar="URL", help=_OTLP_HELP)
    add("--goodput", metavar="TARGETS", help=_GOODPUT_HELP)
    add(
        "--metrics-tenants",
        type=int,
        default=32,
        metavar="N",
        help="tenants that metrics, which anyone may read, count by name; the rest is other "
        "(default %(default)s)",
    )


def read_outlets(args: argparse.Namespace) -> OutletOptions:
    """Where requests are written to."""
    from server.core.telemetry.outlets import OutletOptions

    return OutletOptions(request_log=args.request_log, otlp_endpoint=args.otlp_endpoint)


def read_statistics(args: argparse.Namespace) -> StatisticsOptions:
    """What is promised and counted. Raises ValueError for targets that are none, or a negative count."""
    from server.core.statistics import StatisticsOptions
    from server.core.telemetry.goodput import read_targets

    if args.metrics_tenants < 0:
        raise ValueError(f"--metrics-tenants {args.metrics_tenants} is negative")
    if args.goodput is None:
        return StatisticsOptions(max_tenants=args.metrics_tenants)
    targets = read_targets(args.goodput)
    return StatisticsOptions(targets=targets, class_targets={}, max_tenants=args.metrics_tenants)

"""`jaxserve bench`: a server under load, measured, checked, reported and compared."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, say, shows_status

if TYPE_CHECKING:
    from jaxserve.bench.cells import Cell
    from jaxserve.bench.config import BenchConfig
    from jaxserve.bench.quality import Evaluation
    from jaxserve.bench.result import Check, Result
    from jaxserve.bench.run import Address

_DESCRIPTION = """Sends the traffic that a configuration describes to a server, and says what became of it.
Two results can be compared at the same limits, and drawn."""
_RUN = """Measures a server under the matrix and the scenarios of a TOML file, whose settings are described
in jaxserve/bench/config.py and scenarios.py. The whole of it goes into the result, with the machine, the
versions and what the server says of its model. Exit status 1: the answers did not pass a check."""
_COMPARE = """Says of two results of the same configuration on the same machine which had the higher goodput
(requests a second within both limits) in which cell, and where that is no more than noise."""


class Bench:
    name = "bench"
    help = "measure a server under load, compare results"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
        run = actions.add_parser("run", help="measure a server", description=_RUN)
        _add_run_arguments(run)
        run.set_defaults(act=_run)
        compare = actions.add_parser("compare", help="which of two is better where", description=_COMPARE)
        _add_compare_arguments(compare)
        compare.set_defaults(act=_compare)
        report = actions.add_parser("report", help="print and draw a result again")
        report.add_argument("result", type=Path, metavar="RESULT.json")
        _add_limits(report, "those of the configuration")
        _add_html(report)
        report.set_defaults(act=_report)
        for action in (run, compare, report):
            add_verbose_argument(action)

    def run(self, args: argparse.Namespace) -> int:
        for path in (getattr(args, name, None) for name in ("json", "html")):
            if path is not None and not path.parent.is_dir():  # Not after all the work.
                raise ValueError(f"{path}: there is no folder {path.parent}")
        if args.html is not None:
            from jaxserve.bench.plots import require_matplotlib

            require_matplotlib()
        return args.act(args)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG.toml", help="what to ask, how often, and within which limits")
    add("--url", help="of a running server; without it, `jaxserve serve` is started on the loopback")
    add("--model", metavar="MODEL", help="what to serve; with --url what to ask for (default: the first)")
    add(
        "--serve-arguments",
        type=shlex.split,
        default=[],
        metavar="ARGUMENTS",
        help="of the server that is started, as --serve-arguments='--quantize int8 --num-slots 8'",
    )
    add("--tokens", type=Path, metavar="FILE", help="of a running server's tenants: lines of TENANT TOKEN")
    add("--server-pid", type=int, metavar="N", help="of a running server on this machine, to break its parts")
    add("--reference", type=Path, metavar="RESULT.json", help="an earlier result with the answers to expect")
    add("--evaluation", type=Path, metavar="FILE", help="report of `jaxserve evaluate --json`, to be passed")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    _add_html(parser)
    add("--dry-run", action="store_true", help="say what would be asked, and ask nothing")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    _add_limits(parser, "those of A's configuration")
    parser.add_argument(
        "--anyway", action="store_true", help="although configurations or machines are not the same"
    )
    _add_html(parser)


def _add_limits(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--ttft", type=float, metavar="S", help=f"longest time to the first token (default: {default})"
    )
    parser.add_argument("--tpot", type=float, metavar="S", help="longest mean time for each further one")


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there")


def _run(args: argparse.Namespace) -> int:
    from jaxserve.bench.cells import digest_of_plan
    from jaxserve.bench.config import BenchConfig

    config = BenchConfig.read(args.config)
    if args.dry_run:
        _say_plan(config)
        return 0
    _check_target(args)
    plan = digest_of_plan(config)
    reference = _read_reference(args.reference, plan)
    evaluation = _read_evaluation(args.evaluation)
    result = _measure(args, config, plan)
    checks = _further_checks(config, result, reference, evaluation)
    result = dataclasses.replace(result, checks=(*result.checks, *checks))
    if args.json is not None:
        args.json.write_text(result.to_json(), encoding="utf-8")
    _show(result, args.html, config.limits.ttft, config.limits.tpot)
    for check in result.checks:
        if not check.passed:
            say(f"jaxserve bench: check not passed: {check.name}: {check.detail}")
    return 0 if result.passed else 1


def _compare(args: argparse.Namespace) -> int:
    from jaxserve.bench.compare import compare, comparison_table
    from jaxserve.bench.result import Result

    a, b = Result.read(args.a), Result.read(args.b)
    ttft, tpot = _limits(args, a)
    comparison = compare(a, b, ttft=ttft, tpot=tpot, anyway=args.anyway)
    print(comparison_table(comparison), flush=True)
    if args.html is not None:
        from jaxserve.bench.report import comparison_page

        args.html.write_text(comparison_page(comparison, a, b), encoding="utf-8")
    return 0


def _report(args: argparse.Namespace) -> int:
    from jaxserve.bench.result import Result

    result = Result.read(args.result)
    _show(result, args.html, *_limits(args, result))
    return 0


def _show(result: Result, html: Path | None, ttft: float, tpot: float) -> None:
    from jaxserve.bench.summary import table

    print(table(result, ttft, tpot), flush=True)
    if html is not None:
        from jaxserve.bench.report import result_page

        html.write_text(result_page(result, ttft, tpot), encoding="utf-8")


def _limits(args: argparse.Namespace, result: Result) -> tuple[float, float]:
    """In seconds: what the arguments say, else what the result's configuration did."""
    own = result.config["limits"]
    ttft = own["ttft"] if args.ttft is None else args.ttft
    tpot = own["tpot"] if args.tpot is None else args.tpot
    for name, value in (("--ttft", ttft), ("--tpot", tpot)):
        if not value > 0:
            raise ValueError(f"{name} {value} is not a number of seconds above 0")
    return ttft, tpot


def _say_plan(config: BenchConfig) -> None:
    from jaxserve.bench.cells import cells_of, digest_of_plan

    for cell in cells_of(config):
        print(f"{cell.kind:14} {cell.name}: {len(cell.work(config, 0).asks)} requests")
    print(
        f"{config.num_requests} requests in {config.repeats} repeats; "
        f"configuration {config.digest}, requests {digest_of_plan(config)}"
    )


def _check_target(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that do not go together, before anything is started."""
    if find_spec("httpx") is None:
        raise ValueError("this needs the extra `bench`: in the checkout, pip install -e '.[bench]'")
    if args.url is None and args.model is None:
        raise ValueError("nothing to ask: give --url of a running server, or --model to serve one")
    if args.url is not None and args.serve_arguments:
        raise ValueError("--serve-arguments are for a server that is started: they do not go with --url")
    for name in ("tokens", "server_pid"):
        if args.url is None and getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is about a running server: it needs --url")


def _read_reference(path: Path | None, plan: str) -> Result | None:
    """Raises ValueError for a result of other requests than those of this digest."""
    from jaxserve.bench.result import Result

    if path is None:
        return None
    reference = Result.read(path)
    if reference.plan_digest != plan:
        raise ValueError(f"{path}: its requests were others ({reference.plan_digest}; these are {plan})")
    return reference


def _read_evaluation(path: Path | None) -> Evaluation | None:
    """Raises ValueError for a file that is no report."""
    from jaxserve.bench.quality import Evaluation

    return None if path is None else Evaluation.read(path)


def _measure(args: argparse.Namespace, config: BenchConfig, plan: str) -> Result:
    """Raises ValueError, with the server's words, if it cannot be started or asked."""
    from tqdm import tqdm

    from jaxserve.bench.cells import cells_of
    from jaxserve.bench.run import run_benchmark
    from jaxserve.bench.traffic import DoorError

    cells = cells_of(config)
    total = config.repeats * len(cells) + 1
    try:
        with _server(args, cells) as address, tqdm(total=total, disable=not shows_status(args)) as bar:

            def progress(label: str) -> None:
                bar.set_description(label, refresh=False)
                bar.update()

            return asyncio.run(run_benchmark(config, address, progress, plan=plan))
    except (DoorError, RuntimeError) as error:
        raise ValueError(str(error)) from error


@contextmanager
def _server(args: argparse.Namespace, cells: Sequence[Cell]) -> Iterator[Address]:
    """The one that was named, or a new one, with tokens for the tenants if there are any."""
    from jaxserve.bearer_tokens import read_tokens
    from jaxserve.bench.run import Address, check_tenants
    from jaxserve.bench.served import served_model

    if args.url is not None:
        tenants = {} if args.tokens is None else read_tokens(args.tokens)
        tokens = {name: token for token, name in tenants.items()}
        check_tenants(cells, tokens)
        yield Address(url=args.url, model=args.model, tokens=tokens, pid=args.server_pid)
        return
    tokens = {name: secrets.token_hex(16) for cell in cells for name in cell.tenants}
    with tempfile.TemporaryDirectory() as folder:
        arguments = list(args.serve_arguments)
        if tokens:
            arguments += ["--tokens", str(_write_tokens(Path(folder) / "tokens", tokens))]
        with served_model(args.model, arguments) as started:
            assert started.url is not None
            yield Address(
                url=started.url,
                tokens=tokens,
                pid=started.pid,
                arguments=shlex.join([args.model, *args.serve_arguments]),
                chosen=started.chosen,
            )


def _write_tokens(path: Path, tokens: Mapping[str, str]) -> Path:
    path.touch(mode=0o600)
    path.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
    return path


def _further_checks(
    config: BenchConfig, result: Result, reference: Result | None, evaluation: Evaluation | None
) -> list[Check]:
    from jaxserve.bench.quality import check_evaluation, check_reference

    checks: list[Check] = []
    if reference is not None:
        checks.append(check_reference(result.cells, reference, config.quality))
    if evaluation is not None:
        checks.append(check_evaluation(evaluation, result.served))
    return checks

"""The metrics as a page to read: `python -m server.core.telemetry.table` writes `server/METRICS.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from server.core.telemetry.families import FAMILIES
from server.core.telemetry.prometheus import CALLS, CALLS_HELP, CALLS_LABELS

PAGE = Path(__file__).resolve().parents[2] / "METRICS.md"

_HEAD = """# Metrics

What `/metrics` (and `GetStats` with `with_metrics`, over gRPC) says, in Prometheus' text format. Names that
begin with `vllm:` mean what they mean in vLLM, so its dashboards and the Kubernetes Gateway API inference
extension read them as they are. Every label has few values: priority classes and tenants beyond the first
ones (`--metrics-tenants`) are counted as `other`, an empty tenant is `none`, and who is refused names none.
`alerts/jaxserve.rules.yml` holds alert rules over them. Written by `python -m server.core.telemetry.table`.

| Name | Kind | Labels | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page, in Markdown."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows())


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for family in FAMILIES:
        name = family.name + "_total" * (family.kind == "counter")
        yield _row(name, family.kind, ("model_name", *family.labels), family.help)
    yield _row(f"{CALLS}_total", "counter", CALLS_LABELS, CALLS_HELP)
    yield _row("process_*", "gauge", (), "Memory, processor time and files of the process.")


def _row(name: str, kind: str, labels: tuple[str, ...], text: str) -> tuple[str, str, str, str]:
    return f"`{name}`", kind, " ".join(f"`{label}`" for label in labels), text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

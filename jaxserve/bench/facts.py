"""What was measured: the versions, and what the server says of itself."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxserve.bench.http_stream import get_page, list_models
from jaxserve.bench.traffic import DoorError
from jaxserve.version import __version__

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OPEN_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server says of the model that was asked."""

    model: str
    """What requests call it."""
    root: str = ""
    """Its own name."""
    max_model_len: int | None = None
    fingerprint: str = ""
    """Changes with the weights."""
    precision: str = ""
    kv_format: str = ""
    device: str = ""
    version: str = ""
    """Of the engine."""
    arguments: str = ""
    """Of `jaxserve serve`, where the benchmark started it."""
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    """What it chose then."""


def client_versions() -> dict[str, str]:
    """Of what sends the load."""
    return {"jaxserve": __version__, "python": platform.python_version(), "httpx": httpx.__version__}


async def read_served(client: httpx.AsyncClient, model: str | None) -> Served:
    """Ask a server about a model, by default its first. Raises DoorError if it has none of that name."""
    listed = {entry["id"]: entry for entry in await list_models(client)}
    name = model or next(iter(listed))
    if name not in listed:
        raise DoorError(f"model {name!r} is not served there; served: {', '.join(map(repr, listed))}")
    metrics = await _metrics(client)
    labels = next((one for one, _ in metrics.get("jaxserve:model_info", []) if one["model_name"] == name), {})
    told: dict[str, Any] = {key: labels[key] for key in labels.keys() & Served.__dataclass_fields__.keys()}
    entry = listed[name]
    return Served(
        model=name,
        root=entry.get("root") or "",
        max_model_len=entry.get("max_model_len"),
        **told,
    )


async def num_open(client: httpx.AsyncClient) -> int | None:
    """Requests that the server has in slots or waiting; None if it does not say so, or cannot be asked."""
    try:
        metrics = await _metrics(client)
    except DoorError:
        return None
    if any(name not in metrics for name in _OPEN_GAUGES):
        return None
    return int(sum(value for name in _OPEN_GAUGES for _, value in metrics[name]))


async def _metrics(client: httpx.AsyncClient) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, of a server that has Prometheus' page of them. Raises DoorError if it has gone or
    hangs, or the page is another."""
    try:
        answer = await get_page(client, "/metrics")
    except DoorError as error:
        raise DoorError(f"{client.base_url} has gone: {error}") from error
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    if answer.status_code == httpx.codes.OK:
        for match in _SAMPLE.finditer(answer.text):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            try:
                found.setdefault(match["name"], []).append((labels, float(match["value"])))
            except ValueError as error:
                raise DoorError(f"{client.base_url}/metrics: {match[0]!r} is no sample") from error
    return found

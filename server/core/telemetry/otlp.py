"""Whether spans are wanted, and where they go: an argument, or OpenTelemetry's own environment."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jaxserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_HTTP_PATH = "/v1/traces"


def wants_spans(endpoint: str | None, environ: Mapping[str, str]) -> bool:
    """Whether spans are to be made.

    Args:
        endpoint: of `--otlp-endpoint`.
        environ: of which OpenTelemetry's variables count: an endpoint turns spans on, as does
            OTEL_TRACES_EXPORTER=otlp; OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none turn them off.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return endpoint is not None or exporter == "otlp" or any(environ.get(name) for name in _ENDPOINTS)


def make_provider(endpoint: str | None, environ: Mapping[str, str]) -> TracerProvider:
    """A provider that sends spans by OTLP, in batches, from a thread; `shutdown` sends the last ones.

    What `endpoint` leaves open, the exporter reads from the environment by itself.

    Raises ValueError if a package is missing, or for an endpoint or a protocol that is none.
    """
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ValueError("spans need the extra `otel`: in the checkout, pip install -e '.[otel]'")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    about = {"service.version": __version__} | ({} if named else {"service.name": "jaxserve"})
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_make_exporter(endpoint, environ)))
    return provider


def _make_exporter(endpoint: str | None, environ: Mapping[str, str]) -> SpanExporter:
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "grpc")
    if protocol not in _EXPORTERS:
        raise ValueError(f"OTLP protocol {protocol!r} is unknown; there are {', '.join(_EXPORTERS)}")
    try:
        module = import_module(_EXPORTERS[protocol])
    except ModuleNotFoundError as error:
        raise ValueError(f"OTLP over {protocol} needs the package of {_EXPORTERS[protocol]}") from error
    if endpoint is None:
        return module.OTLPSpanExporter()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"OTLP endpoint {endpoint!r}: expected such as http://localhost:4317")
    if protocol != "grpc" and parts.path in ("", "/"):
        endpoint = parts._replace(path=_HTTP_PATH).geturl()
    return module.OTLPSpanExporter(endpoint=endpoint)

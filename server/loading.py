"""Makes services of the command line's routes, and remembers what was chosen for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.run_manifest import BATCH_PART
from server.core import ModelIdentity, Service, identify
from server.core.statistics import StatisticsOptions
from server.core.telemetry.goodput import class_targets
from server.route_arguments import RouteArguments, model_name

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.opened_model import OpenedModel
    from jaxserve.run_manifest import RunManifest
    from jaxserve.scheduling import SchedulerPolicy


class ModelLoader:
    """Iterating over it finds, loads and compiles one model after the other: on any thread, once.

    Raises ValueError for a model that cannot be read or options that cannot be met, PullError where a
    download fails.

    A route whose policy file is a manifest is held to that: see `_check_drift`.
    """

    def __init__(
        self,
        routes: Sequence[RouteArguments],
        statistics: StatisticsOptions,
        *,
        progress: bool,
        manifest_file: Path | None = None,
    ) -> None:
        """`manifest_file`: where to write the manifest of the one route that there is.

        Raises ValueError for a policy that contradicts itself, or a manifest file for several routes; OSError
        for a file that is not there.
        """
        if manifest_file is not None and len(routes) != 1:
            raise ValueError(
                f"--manifest {manifest_file} is for one model, and there are {len(routes)} routes"
            )
        self._routes = routes
        self._policies = [route.read_frozen() for route in routes]
        self._manifest_file = manifest_file
        self._statistics = replace(statistics, compiles_after_ready=self.compiles_after_ready)
        self._compiles_when_ready: int | None = None
        self._progress = progress
        self.lines: list[str] = []
        """What was chosen for the models that are loaded."""
        self.running = False
        """Whether a thread is at work here."""

    def __iter__(self) -> Iterator[Service]:
        self.running = True
        try:
            yield from self._load()
        finally:
            self.running = False

    def compiles_after_ready(self) -> int:
        """Programs that the process has compiled since every model was loaded, whichever it was for."""
        if self._compiles_when_ready is None:
            return 0
        from jaxserve.engine.compile_cache import compile_counter

        return compile_counter().count - self._compiles_when_ready

    def _load(self) -> Iterator[Service]:
        import jax

        from jaxserve.async_engine import Engine
        from jaxserve.engine.build import EngineOptions
        from jaxserve.engine.compile_cache import compile_counter
        from jaxserve.opened_model import loop_of, open_model

        # Whatever is wrong with any of them is to be said before the first is loaded.
        options = [EngineOptions(**route.settings) for route in self._routes]
        platform = jax.default_backend()
        _check_memory(self._routes, platform)
        opened: dict[str, OpenedModel] = {}
        for route in self._routes:
            if route.model not in opened:
                opened[route.model] = open_model(route.model, progress=self._progress)
        for route, (policy, frozen), chosen in zip(self._routes, self._policies, options, strict=True):
            model = opened[route.model]
            defaults = model.sampling_defaults if route.generation_config == "auto" else {}
            device = model.build_engine(chosen, progress=self._progress)
            manifest = model.manifest(
                device,
                chosen,
                policy=policy,
                prefix_caching=route.prefix_cache,
                sampling_defaults=defaults,
            )
            _check_drift(route, frozen, manifest)
            if self._manifest_file is not None:
                manifest.write(self._manifest_file)
            identity = identify(
                route.name, model_name(route.model), model, device.config, platform, manifest.digest
            )
            self.lines += describe(identity, device.config, route, policy, defaults)
            loop = loop_of(model, device, chosen, prefix_caching=route.prefix_cache, policy=policy)
            yield Service(
                identity,
                model.tokenizer,
                Engine(loop),
                sampling_defaults=defaults,
                statistics=self._statistics_of(policy),
            )
        self._compiles_when_ready = compile_counter().count

    def _statistics_of(self, policy: SchedulerPolicy) -> StatisticsOptions:
        """A class is held to what its policy aims at, unless the operator promises otherwise."""
        if not self._statistics.class_targets:
            return self._statistics
        return replace(self._statistics, class_targets=class_targets(policy.classes))


def _check_drift(route: RouteArguments, frozen: RunManifest | None, manifest: RunManifest) -> None:
    """Raise ValueError, naming each difference, where a route is not what its manifest says.

    What a batch wrote of itself alone does not concern a server.
    """
    if frozen is None:
        return
    parts = {*frozen.entries, *manifest.entries} - {BATCH_PART}
    if drift := frozen.drift(manifest, parts):
        raise ValueError(f"route {route.name!r} is not what {route.policy_file} says: {'; '.join(drift)}")


def describe(
    identity: ModelIdentity,
    config: EngineConfig,
    route: RouteArguments,
    policy: SchedulerPolicy,
    sampling_defaults: Mapping[str, Any],
) -> list[str]:
    """What was chosen for a model, a line for each thing."""
    cache = config.cache
    pages = " + ".join(
        f"{count - 1} x {cache.page_size} = {(count - 1) * cache.page_size} tokens"
        for count in cache.num_pages
    )
    decode, chunk = (" ".join(map(str, rungs)) for rungs in (config.decode_rows, config.chunk_rows))
    own = "" if identity.model == identity.name else f" is {identity.model}"
    overflow = "" if route.fallback is None else f", overflow to {route.fallback}"
    source = "" if route.policy_file is None else f" ({route.policy_file})"
    most = "" if policy.max_waiting is None else f", at most {policy.max_waiting} waiting"
    sampling = ", ".join(f"{name} {value}" for name, value in sorted(sampling_defaults.items()))
    parts = {
        "model": f"{identity.name}{own} ({identity.family}, {identity.fingerprint}){overflow}",
        "device": identity.device,
        "precision": f"{identity.precision}, KV pool in {identity.kv_format}",
        "pages": pages,
        "prefixes": _prefixes(route),
        "policy": f"{policy.order}: {', '.join(one.name for one in policy.classes)}{most}{source}",
        "slots": f"{config.num_slots} sequences of up to {config.max_model_len} tokens",
        "ladder": f"decode {decode}, chunk {chunk}",
        "sampling": f"{sampling} (generation_config.json)" if sampling else "the library's defaults",
        "manifest": identity.manifest,
    }
    return [f"{name:<10}{text}" for name, text in parts.items()]


def _prefixes(route: RouteArguments) -> str:
    if not route.prefix_cache:
        return "not reused"
    host = route.settings.get("host_kv_memory")
    beyond = "" if host is None else f", kept in {host / 2**20:.0f} MiB of the host's memory too"
    return f"reused within a tenant or a named namespace{beyond}"


def _check_memory(routes: Sequence[RouteArguments], platform: str) -> None:
    """Raise ValueError where the first engine would take the memory of all."""
    if len(routes) == 1 or platform == "cpu":
        return
    for route in routes:
        if route.settings.get("kv_memory") is None:
            raise ValueError(
                f"route {route.name!r}: several engines share a {platform} device: say how large the KV pool "
                "of each is, as in kv_memory=8G"
            )

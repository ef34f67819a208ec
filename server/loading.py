"""Makes services of the command line's routes, and remembers what was chosen for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.run_manifest import BATCH_PART, KERNELS_PART, check_place
from server.core import ModelIdentity, Service, identify
from server.core.statistics import StatisticsOptions
from server.core.telemetry.goodput import class_targets
from server.route_arguments import RouteArguments, model_name

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.options import EngineOptions
    from jaxserve.opened_model import OpenedModel
    from jaxserve.run_manifest import RunManifest
    from jaxserve.scheduling import SchedulerPolicy


class ModelLoader:
    """Iterating over it finds, loads and compiles one model after the other: on any thread, once.

    Raises ValueError for a model that cannot be read or options that cannot be met, PullError where a
    download fails.

    A route whose policy file is a manifest is held to that: see `_PlannedRoute`.
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

        Raises ValueError for a policy that contradicts itself, or a manifest file that is for several routes
        or cannot be written; OSError for a policy file that is not there.
        """
        if manifest_file is not None and len(routes) != 1:
            raise ValueError(
                f"--manifest {manifest_file} is for one model, and there are {len(routes)} routes"
            )
        if manifest_file is not None:
            check_place(manifest_file)
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

        from jaxserve.engine.compile_cache import compile_counter
        from jaxserve.opened_model import loop_of, start_loop

        platform = jax.default_backend()
        for one in self._plan(platform):
            device = one.model.build_engine(one.options, progress=self._progress)
            manifest = one.manifest(device.config, device.kernels)
            one.check_drift(manifest)
            if self._manifest_file is not None:
                manifest.write(self._manifest_file)
            route = one.route
            identity = identify(
                route.name, model_name(route.model), one.model, device.config, platform, manifest.digest
            )
            self.lines += describe(identity, device.config, route, one.policy, one.sampling_defaults)
            loop = loop_of(
                one.model, device, one.options, prefix_caching=route.prefix_cache, policy=one.policy
            )
            yield Service(
                identity,
                one.model.tokenizer,
                start_loop(loop),
                sampling_defaults=one.sampling_defaults,
                statistics=self._statistics_of(one.policy),
            )
        self._compiles_when_ready = compile_counter().count

    def _plan(self, platform: str) -> list[_PlannedRoute]:
        """The routes with all that is chosen for them.

        Whatever can be known to be wrong with any of them is said here, before the first one's weights are
        read.
        """
        from jaxserve.engine.options import EngineOptions
        from jaxserve.opened_model import open_model

        options = [EngineOptions(**route.settings) for route in self._routes]
        _check_memory(self._routes, platform)
        opened: dict[str, OpenedModel] = {}
        for route in self._routes:
            if route.model not in opened:
                opened[route.model] = open_model(route.model, progress=self._progress)
        planned = [
            _PlannedRoute(route, opened[route.model], chosen, policy, frozen)
            for route, (policy, frozen), chosen in zip(self._routes, self._policies, options, strict=True)
        ]
        for one in planned:
            one.model.draft_checkpoint(one.options, progress=self._progress)
            if one.frozen is not None:
                one.check_drift(one.manifest(one.model.configure(one.options)))
        return planned

    def _statistics_of(self, policy: SchedulerPolicy) -> StatisticsOptions:
        """A class is held to what its policy aims at, unless the operator promises otherwise."""
        if not self._statistics.class_targets:
            return self._statistics
        return replace(self._statistics, class_targets=class_targets(policy.classes))


@dataclass(frozen=True)
class _PlannedRoute:
    """A route as it is to be served."""

    route: RouteArguments
    model: OpenedModel
    options: EngineOptions
    policy: SchedulerPolicy
    frozen: RunManifest | None
    """What the route is held to."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self.model.sampling_defaults if self.route.generation_config == "auto" else {}

    def manifest(self, config: EngineConfig, kernels: Mapping[str, str] | None = None) -> RunManifest:
        """`kernels`: of the engine; without them their part is left out."""
        return self.model.manifest(
            config,
            self.options,
            kernels=kernels,
            policy=self.policy,
            prefix_caching=self.route.prefix_cache,
            sampling_defaults=self.sampling_defaults,
        )

    def check_drift(self, manifest: RunManifest) -> None:
        """Raise ValueError, naming each difference, where the route is not what its manifest says.

        What a batch wrote of itself alone does not concern a server; kernels that are not known yet differ
        from none.
        """
        if self.frozen is None:
            return
        unknown = {BATCH_PART} | {KERNELS_PART} - manifest.entries.keys()
        if drift := self.frozen.drift(manifest, {*self.frozen.entries, *manifest.entries} - unknown):
            name, path = self.route.name, self.route.policy_file
            raise ValueError(f"route {name!r} is not what {path} says: {'; '.join(drift)}")


def describe(
    identity: ModelIdentity,
    config: EngineConfig,
    route: RouteArguments,
    policy: SchedulerPolicy,
    sampling_defaults: Mapping[str, Any],
) -> list[str]:
    """What was chosen for a model, a line for each thing."""
    from sharding import mesh_name

    cache = config.cache
    several = f"{config.num_replicas} replicas, each " if config.num_replicas > 1 else ""
    pages = several + " + ".join(
        f"{count - 1} x {cache.page_size} = {(count - 1) * cache.page_size} tokens"
        for count in cache.num_pages
    )
    decode, chunk = (" ".join(map(str, rungs)) for rungs in (config.decode_rows, config.chunk_rows))
    mesh = f", {mesh_name(config.mesh)}" if config.mesh else ""
    prefill_mesh = route.settings.get("prefill_mesh")
    if prefill_mesh is not None:
        mesh += f"; prompts on {prefill_mesh}"
    own = "" if identity.model == identity.name else f" is {identity.model}"
    overflow = "" if route.fallback is None else f", overflow to {route.fallback}"
    source = "" if route.policy_file is None else f" ({route.policy_file})"
    most = "" if policy.max_waiting is None else f", at most {policy.max_waiting} waiting"
    sampling = ", ".join(f"{name} {value}" for name, value in sorted(sampling_defaults.items()))
    parts = {
        "model": f"{identity.name}{own} ({identity.family}, {identity.fingerprint}){overflow}",
        "device": f"{identity.device}{mesh}",
        "precision": f"{identity.precision}, KV pool in {identity.kv_format}",
        "pages": pages,
        "prefixes": _prefixes(route),
        "policy": f"{policy.order}: {', '.join(one.name for one in policy.classes)}{most}{source}",
        "slots": f"{config.num_slots * config.num_replicas} sequences of up to {config.max_model_len} tokens",
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

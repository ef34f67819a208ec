"""Compiled programs: kept on disk between processes, and counted once an engine is ready."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import jax
import jax.monitoring

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_compilation_cache(folder: Path) -> None:
    """Keep every compiled program under `folder`, or where the user has already chosen to."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts the programs that this process has had XLA compile, or read from the cache, since it began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def count(self) -> int:
        return self._count

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1


_counter: CompileCounter | None = None


def compile_counter() -> CompileCounter:
    """The process's one counter: JAX's listeners cannot be taken back."""
    global _counter  # noqa: PLW0603
    if _counter is None:
        _counter = CompileCounter()
    return _counter

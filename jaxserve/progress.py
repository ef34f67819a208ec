"""Bars on standard error while a model is made ready."""

from __future__ import annotations

import threading
from types import TracebackType

from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]

_WORDS = {"load": ("Loading", "tensors"), "compile": ("Compiling", "programs")}
_DELAY_SECONDS = 1.0


class StageBars:
    """A bar for each stage that takes more than a second; stages may go on side by side, each on a thread."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bars: dict[str, tqdm] = {}
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        with self._lock:
            if stage not in self._bars:
                self._bars[stage] = self._make_bar(stage, total)
            bar = self._bars[stage]
            bar.update(done - bar.n)
            if done == total:
                bar.close()

    def __enter__(self) -> StageBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for bar in self._bars.values():
                bar.close()

    def _make_bar(self, stage: str, total: int) -> tqdm:
        words, unit = _WORDS.get(stage, (stage, "steps"))
        return tqdm(
            desc=words,
            unit=f" {unit}",
            total=total,
            delay=_DELAY_SECONDS,
            disable=not self._shown,
            leave=False,
        )

"""Bars on standard error while a model is made ready."""

from __future__ import annotations

from types import TracebackType

from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]

_WORDS = {"load": ("Loading", "tensors"), "compile": ("Compiling", "programs")}
_DELAY_SECONDS = 1.0


class StageBars:
    """A bar for each stage that takes more than a second. Called with the stage, what is done, the total."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._stage: str | None = None
        self._bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._bar is None:
            self._close()
            words, unit = _WORDS.get(stage, (stage, "steps"))
            self._stage = stage
            self._bar = tqdm(
                desc=words,
                unit=f" {unit}",
                total=total,
                delay=_DELAY_SECONDS,
                disable=not self._shown,
                leave=False,
            )
        self._bar.update(done - self._bar.n)
        if done == total:
            self._close()

    def __enter__(self) -> StageBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

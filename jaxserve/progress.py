"""What is said on standard error while a model is made ready."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]

_WORDS = {
    "load": ("Loading", "tensors"),
    "compile": ("Compiling", "programs"),
    "convert": ("Converting", "tensors"),
}
_DELAY_SECONDS = 1.0


class StageBars:
    """A bar for each stage that takes more than a second; stages may go on side by side, each on a thread.

    Where nothing can draw a bar, such as in a file, there is a line for each stage when it is done.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._draws = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bars: dict[str, tqdm] = {}
        self._started = time.monotonic()
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
                if self._shown and not self._draws:
                    words, unit = _WORDS.get(stage, (stage, "steps"))
                    seconds = time.monotonic() - self._started
                    print(f"{words}: {total} {unit} in {seconds:.1f} s", file=sys.stderr, flush=True)

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
            disable=not (self._shown and self._draws),
            leave=False,
        )

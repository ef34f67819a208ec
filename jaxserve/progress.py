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
    "prefill load": ("Loading for prompts", "tensors"),
    "prefill compile": ("Compiling for prompts", "programs"),
    "calibrate": ("Calibrating", "windows"),
    "convert": ("Converting", "tensors"),
}
_DELAY_SECONDS = 1.0
_LINE_SECONDS = 30.0
"""Between two lines about long work where nothing can draw a bar."""


class StageBars:
    """A bar for each stage that takes more than a second; stages may go on side by side, each on a thread.

    Where nothing can draw a bar, such as in a file, there is a line for each stage when it is done.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._draws = _can_draw()
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


class RequestBar:
    """How far many requests have come, with tokens a second and the time that is left.

    Where nothing can draw a bar there is a line every half minute.
    """

    def __init__(self, shown: bool, total: int, *, done: int = 0) -> None:
        """`total` requests, of which so many were done before."""
        self._shown = shown
        self._draws = _can_draw()
        self._total = total
        self._before = done
        self._started = self._told = time.monotonic()
        self._bar = tqdm(
            desc="Answering",
            unit=" requests",
            total=total,
            initial=done,
            smoothing=0.0,
            disable=not (shown and self._draws),
            leave=False,
        )

    def __call__(self, done: int, num_tokens: int) -> None:
        """So many requests are done, those from before included; so many tokens have come since the start."""
        now = time.monotonic()
        rate = num_tokens / max(now - self._started, 1e-9)
        if self._draws:
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
            # A step may end no request, and still the time goes on.
            self._bar.update(done - self._bar.n)
        elif self._shown and now - self._told >= _LINE_SECONDS:
            self._told = now
            print(self._line(done, now - self._started, rate), file=sys.stderr, flush=True)

    def __enter__(self) -> RequestBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def _line(self, done: int, seconds: float, rate: float) -> str:
        line = f"{done} of {self._total} requests, {rate:.1f} tokens a second"
        if done == self._before:
            return line
        left = seconds * (self._total - done) / (done - self._before)
        return f"{line}, {tqdm.format_interval(left)} left"


def _can_draw() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules

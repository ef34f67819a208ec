"""Goodput: the answers that came as fast as was promised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import inf

from jaxserve.outputs import RequestOutput
from jaxserve.scheduling.classes import PriorityClass


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Times in seconds that an answer must keep to count; None promises nothing."""

    ttft: float | None = None
    """From arrival to the first token."""
    tpot: float | None = None
    """Mean time for each token after the first, of the longest sample."""
    e2el: float | None = None
    """From arrival to the end."""

    def __post_init__(self) -> None:
        for name, seconds in self.promised().items():
            if not seconds > 0:
                raise ValueError(f"{name} {seconds} s is no target: it must be above 0")

    def promised(self) -> dict[str, float]:
        """What there is a target for, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    def met(self, times: AnswerTimes) -> bool:
        """Whether an answer kept them all. One without a time, such as that of a second token, keeps it."""
        return all(
            measured is None or measured <= seconds
            for name, seconds in self.promised().items()
            for measured in (getattr(times, name),)
        )


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What targets are held against, in seconds."""

    ttft: float | None
    tpot: float | None
    """None for an answer of one token."""
    e2el: float


def class_targets(classes: Iterable[PriorityClass]) -> dict[str, Targets]:
    """What each priority class aims at."""
    return {
        one.name: Targets(ttft=_finite(one.ttft_target), tpot=_finite(one.tpot_target)) for one in classes
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < inf else None


def read_targets(text: str) -> Targets:
    """Targets spelled as `ttft:500,tpot:50`, in milliseconds, as vLLM's benchmark spells them.

    Raises ValueError, naming the part, for anything else.
    """
    known = tuple(field.name for field in fields(Targets))
    seconds: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        if name not in known or name in seconds:
            raise ValueError(f"goodput {part!r}: expected each of {', '.join(known)} at most once")
        try:
            seconds[name] = float(value) / 1000
        except ValueError:
            raise ValueError(f"goodput {part!r}: {value!r} is no number of milliseconds") from None
    if not seconds:
        raise ValueError(f"goodput {text!r} names no target: expected such as ttft:500,tpot:50")
    return Targets(**seconds)


def answer_times(output: RequestOutput, arrival: float, first_token: float | None, end: float) -> AnswerTimes:
    """The times of a finished answer.

    Args:
        output: the answer.
        arrival: of the request, in seconds of `time.monotonic`, as are the rest.
        first_token: None if none ever came.
        end: when the answer was complete.
    """
    if first_token is None:
        return AnswerTimes(None, None, end - arrival)
    longest = max(len(sample.token_ids) for sample in output.outputs)
    tpot = (end - first_token) / (longest - 1) if longest > 1 else None
    return AnswerTimes(first_token - arrival, tpot, end - arrival)

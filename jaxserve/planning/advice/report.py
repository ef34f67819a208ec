"""All questions, all rules, and what they come to: as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import Advice, Answer, Question, Rule
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.questions import answer
from jaxserve.planning.advice.rules_batch import RULES as BATCH_RULES
from jaxserve.planning.advice.rules_compared import RULES as COMPARED_RULES
from jaxserve.planning.advice.rules_latency import RULES as LATENCY_RULES
from jaxserve.planning.advice.rules_memory import RULES as MEMORY_RULES
from jaxserve.planning.advice.rules_prefixes import RULES as PREFIXES_RULES

RULES: tuple[Rule, ...] = (
    *MEMORY_RULES,
    *PREFIXES_RULES,
    *BATCH_RULES,
    *LATENCY_RULES,
    *COMPARED_RULES,
)
_WIDTH = 110
_VERDICTS = {True: "yes", False: "no", None: "not known"}


@dataclass(frozen=True)
class AdviceReport:
    """What was found, by the name of the rule, in the order of the questions."""

    answers: Mapping[Question, Answer]
    advice: Mapping[str, Advice]
    quiet: tuple[str, ...]
    """Rules that see no reason for advice."""
    not_judged: Mapping[str, str]
    """What the others need."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "questions": [
                {"question": question.value, "verdict": found.verdict, "because": found.because}
                for question, found in self.answers.items()
            ],
            "advice": [{"rule": name, **asdict(advice)} for name, advice in self.advice.items()],
            "quiet": list(self.quiet),
            "not_judged": dict(self.not_judged),
        }

    def text(self) -> str:
        """For a reader."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for number, (question, found) in enumerate(self.answers.items(), start=1):
            yield from _wrapped(
                f"{number}. {question.value} ", f"{_VERDICTS[found.verdict]}: {found.because}"
            )
        for name, advice in self.advice.items():
            yield ""
            yield f"{name}: {advice.technique}"
            for sentence in advice.evidence:
                yield from _wrapped("  evidence   ", sentence)
            for setting in advice.settings:
                yield from _wrapped("  setting    ", str(setting))
            yield from _wrapped("  trade-off  ", advice.trade_off)
            yield from _wrapped("  watch      ", ", ".join(advice.watch))
        yield ""
        if not self.advice:
            yield "no advice: of what could be judged, nothing stands out"
        if self.quiet:
            yield from _wrapped("all is well   ", ", ".join(self.quiet))
        for needed, names in _by_need(self.not_judged).items():
            yield from _wrapped("not judged    ", f"{', '.join(names)}: needs {needed}")


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * min(len(head), 14)
    return textwrap.wrap(
        head + text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _by_need(not_judged: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, needed in not_judged.items():
        names.setdefault(needed, []).append(name)
    return names


def advise(seen: Evidence) -> AdviceReport:
    """Ask every question, and let every rule judge."""
    advice: dict[str, Advice] = {}
    quiet: list[str] = []
    not_judged: dict[str, str] = {}
    order = list(Question)
    for rule in sorted(RULES, key=lambda rule: order.index(rule.question)):
        try:
            found = rule.judge(seen)
        except NotMeasured as missing:
            not_judged[rule.name] = str(missing)
            continue
        if found is None:
            quiet.append(rule.name)
        else:
            advice[rule.name] = found
    return AdviceReport(
        {question: answer(question, seen) for question in order}, advice, tuple(quiet), not_judged
    )

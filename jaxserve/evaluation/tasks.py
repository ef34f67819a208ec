"""Answers to prompts, judged slice by slice, beside the reference's answers to the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.evaluation.instructions import CHECKS, follows
from jaxserve.evaluation.judging import (
    check_schema,
    common_share,
    is_exact,
    meets_schema,
    refuses,
    require_schema_checker,
)
from jaxserve.evaluation.measures import Measure, SliceReport
from jaxserve.evaluation.prompt_sets import Case


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str = ""
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Answered:
    """A case and both answers to it."""

    case: Case
    model: Answer
    reference: Answer


Judge = Callable[[Case, str], Iterator[bool]]
"""What of a case can be judged of an answer's text, each a success or not."""


def check_cases(cases: Sequence[Case]) -> None:
    """Raise ValueError, naming file and line, for a case whose answers could not be judged."""
    for case in cases:
        if case.schema is not None:
            require_schema_checker()
        try:
            if case.schema is not None:
                check_schema(case.schema)
            for instruction in case.instructions:
                follows(instruction, "An answer.")
        except ValueError as error:
            raise ValueError(f"{case.source}: {error}") from error


def judge_slices(answered: Sequence[Answered], *, matches: str = "exact") -> list[SliceReport]:
    """The figures of every slice, in the order in which they first come.

    `matches` is the measure of answers that match: "exact", or "needle" where hidden numbers are asked for.
    """
    slices: dict[str, list[Answered]] = {}
    for one in answered:
        slices.setdefault(one.case.slice, []).append(one)
    return [_judge_slice(name, part, matches) for name, part in slices.items()]


def judged_measures(cases: Sequence[Case], *, matches: str = "exact") -> list[SliceReport]:
    """The slices of cases that nobody has answered yet: which measures each has, their values void."""
    return judge_slices([Answered(case, Answer(), Answer()) for case in cases], matches=matches)


def not_judged(cases: Sequence[Case]) -> Counter[str]:
    """Instructions that there is no check for, by name."""
    names = (instruction.name for case in cases for instruction in case.instructions)
    return Counter(name for name in names if name not in CHECKS)


def _judge_slice(name: str, answered: Sequence[Answered], matches: str) -> SliceReport:
    measures: dict[str, Measure] = {}
    judges: dict[str, Judge] = {matches: _matches, "schema": _meets, "instructions": _follows}
    for measure, judge in judges.items():
        model = [good for one in answered for good in judge(one.case, one.model.text)]
        reference = [good for one in answered for good in judge(one.case, one.reference.text)]
        if model:
            shares = _share(model), _share(reference)
            measures[measure] = Measure(shares[0], *shares)
            measures[f"{measure}-loss"] = Measure(shares[1] - shares[0])
    refusals = [_share([refuses(answer.text) for answer in side]) for side in _sides(answered)]
    measures["refusals-change"] = Measure(abs(refusals[0] - refusals[1]), *refusals)
    shares = [common_share(one.model.token_ids, one.reference.token_ids) for one in answered]
    measures["agreement"] = Measure(sum(shares) / len(shares))
    measures["identical"] = Measure(_share([share == 1 for share in shares]))
    return SliceReport(name, len(answered), "prompts", measures)


def _sides(answered: Sequence[Answered]) -> tuple[list[Answer], list[Answer]]:
    return [one.model for one in answered], [one.reference for one in answered]


def _share(outcomes: Sequence[bool]) -> float:
    return sum(outcomes) / len(outcomes)


def _matches(case: Case, text: str) -> Iterator[bool]:
    if case.answer is not None:
        yield is_exact(text, case.answer)


def _meets(case: Case, text: str) -> Iterator[bool]:
    if case.schema is not None:
        yield meets_schema(text, case.schema)


def _follows(case: Case, text: str) -> Iterator[bool]:
    for instruction in case.instructions:
        followed = follows(instruction, text)
        if followed is not None:
            yield followed

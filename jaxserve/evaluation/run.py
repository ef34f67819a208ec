"""An evaluation from beginning to end: read the texts with both models, have both answer, judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]

from jaxserve.evaluation.measures import Floor, Measure, SliceReport, judge_floors, text_slice
from jaxserve.evaluation.needle import NeedleCase
from jaxserve.evaluation.prompt_sets import Case
from jaxserve.evaluation.report import AnswerPair, EvaluationReport, NeedleCell, SideReport
from jaxserve.evaluation.scoring import Scorer
from jaxserve.evaluation.sides import Generation, Side, require_same_vocabulary
from jaxserve.evaluation.tasks import (
    Answer,
    Answered,
    check_cases,
    judge_slices,
    judged_measures,
    not_judged,
)
from jaxserve.plan import SamplingParams
from jaxserve.prompts import EncodedPrompt
from jaxserve.quantization import precision_of
from jaxserve.text.windows import cut_windows

_TEXT_MEASURES: tuple[str, ...] = ("perplexity", "perplexity-change", "kl", "kl-p99", "top1")


@dataclass(frozen=True)
class Text:
    """A text to read, under the name of its slice."""

    name: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    texts: Sequence[Text] = ()
    cases: Sequence[Case] = ()
    needles: Sequence[NeedleCase] = ()
    floors: Sequence[Floor] = ()
    context: int = 512
    """Tokens of a window of text."""
    max_tokens: int | None = None
    """Most tokens of each text; None for all."""
    answer_tokens: int = 256
    """Longest answer."""


@dataclass(frozen=True)
class _Speeds:
    """Tokens a second of the model and the reference."""

    model: float
    reference: float


def evaluate(model: Side, reference: Side, plan: Plan, *, progress: bool = False) -> EvaluationReport:
    """Measure a model against a reference.

    Args:
        model: the one that is judged.
        reference: the one that it is judged by; may be the same model in another precision.
        plan: what to measure.
        progress: show bars on standard error.

    Raises ValueError, before anything is loaded, for vocabularies that differ, a plan that measures nothing,
    floors that nothing measures, and cases that could not be answered or judged.
    """
    require_same_vocabulary(model, reference)
    check_cases(plan.cases)
    judge_floors(plan.floors, planned_slices(plan))
    cases = [*plan.cases, *(needle.case for needle in plan.needles)]
    prompts = [(side, _encode(side, cases)) for side in (model, reference)]
    slices, scored = _read_texts(model, reference, plan, progress) if plan.texts else ([], None)
    generations = _answer(prompts, plan, progress) if cases else []
    answered = _join(cases, generations) if cases else []
    speeds = _Speeds(*(one.num_tokens / one.seconds for one in generations)) if cases else None
    own, found = answered[: len(plan.cases)], answered[len(plan.cases) :]
    needle_slices = judge_slices(found, matches="needle")
    slices = [*slices, *judge_slices(own), *needle_slices]
    return EvaluationReport(
        model=_side_report(model, scored and scored.model, speeds and speeds.model),
        reference=_side_report(reference, scored and scored.reference, speeds and speeds.reference),
        slices=slices,
        verdicts=judge_floors(plan.floors, slices),
        needle_grid=_grid(plan.needles, found),
        answers=[
            AnswerPair(one.case.source, one.case.slice, one.model.text, one.reference.text)
            for one in answered
        ],
        not_judged=dict(not_judged(plan.cases)),
    )


def planned_slices(plan: Plan) -> list[SliceReport]:
    """The slices that a plan measures, with every measure but no figures. Raises ValueError for none."""
    void = dict.fromkeys(_TEXT_MEASURES, Measure(0.0))
    texts = [SliceReport(text.name, 0, "tokens", void) for text in plan.texts]
    needles = judged_measures([needle.case for needle in plan.needles], matches="needle")
    slices = [*texts, *judged_measures(plan.cases), *needles]
    if not slices:
        raise ValueError("nothing to measure: give a text, prompts or needle lengths")
    return slices


def _read_texts(
    model: Side, reference: Side, plan: Plan, progress: bool
) -> tuple[list[SliceReport], _Speeds]:
    """A slice for each text."""
    for text in plan.texts:
        _require_same_tokens(model, reference, text)
    windows = {
        text.name: cut_windows(
            model.tokenizer, text.content, context=plan.context, max_tokens=plan.max_tokens
        )
        for text in plan.texts
    }
    scorer = Scorer(model, reference, context=plan.context)
    total = sum(len(window.token_ids) - 1 for part in windows.values() for window in part)
    with tqdm(desc="Scoring", unit=" tokens", total=total, disable=not progress, leave=False) as bar:
        scores = {name: scorer.score(part, bar.update) for name, part in windows.items()}
    seconds = [
        sum(part.model_seconds for part in scores.values()),
        sum(part.reference_seconds for part in scores.values()),
    ]
    slices = [text_slice(name, part.tokens) for name, part in scores.items()]
    return slices, _Speeds(*(total / each for each in seconds))


def _require_same_tokens(model: Side, reference: Side, text: Text) -> None:
    """Raise ValueError if vocabularies of one size read a text as different tokens."""
    if model.tokenizer is reference.tokenizer:
        return
    ours, theirs = (side.tokenizer.encode(text.content) for side in (model, reference))
    if ours != theirs:
        place = next((i for i, both in enumerate(zip(ours, theirs, strict=False)) if len({*both}) > 1), 0)
        raise ValueError(
            f"{model.name} and {reference.name} read {text.name} as different tokens, the first of them at "
            f"{place}: their distributions cannot be compared"
        )


def _encode(side: Side, cases: Sequence[Case]) -> list[EncodedPrompt]:
    """The prompts as a model reads them. Raises ValueError, naming the case, for one that is too long."""
    prompts: list[EncodedPrompt] = []
    for case in cases:
        try:
            prompts.append(side.encode(case.messages))
        except ValueError as error:
            raise ValueError(f"{case.source}: {error}") from error
    return prompts


def _answer(
    prompts: Sequence[tuple[Side, Sequence[EncodedPrompt]]], plan: Plan, progress: bool
) -> list[Generation]:
    """Greedy answers, one model after the other."""
    params = SamplingParams(temperature=0, max_tokens=plan.answer_tokens)
    generations: list[Generation] = []
    for side, own in prompts:
        with tqdm(
            desc="Answering", unit=" prompts", total=len(own), disable=not progress, leave=False
        ) as bar:
            generations.append(side.generate(own, params, bar.update))
    return generations


def _join(cases: Sequence[Case], generations: Sequence[Generation]) -> list[Answered]:
    """Each case with the model's answer and the reference's."""
    answers = [
        [Answer(output.outputs[0].text, output.outputs[0].token_ids) for output in generation.outputs]
        for generation in generations
    ]
    return [Answered(*both) for both in zip(cases, *answers, strict=True)]


def _side_report(side: Side, scored: float | None, answered: float | None) -> SideReport:
    defaults = {option.name: option.default for option in fields(side.options)}
    chosen = {name: getattr(side.options, name) for name in defaults}
    footprint = side.footprint()
    return SideReport(
        name=side.name,
        compute_format=side.config.compute_format,
        kv_format=side.config.cache.kv_format,
        precision=precision_of(side.config),
        options={name: value for name, value in chosen.items() if value != defaults[name]},
        weight_bytes=footprint.weight_bytes,
        kv_bytes_per_token=footprint.kv_bytes_per_token,
        scored_tokens_per_second=scored,
        answered_tokens_per_second=answered,
    )


def _grid(needles: Sequence[NeedleCase], found: Sequence[Answered]) -> list[NeedleCell]:
    """Which of the hidden numbers each model gave."""
    cells: list[NeedleCell] = []
    for needle, one in zip(needles, found, strict=True):
        measure = judge_slices([one], matches="needle")[0].measures["needle"]
        cells.append(NeedleCell(needle.length, needle.depth, measure.model == 1, measure.reference == 1))
    return cells

"""The quality gate: a model measured against a reference, slice by slice, and held to floors."""

from jaxserve.evaluation.measures import MEASURES, Floor
from jaxserve.evaluation.needle import NeedleCase, make_needles
from jaxserve.evaluation.prompt_sets import Case, read_prompt_set
from jaxserve.evaluation.report import EvaluationReport
from jaxserve.evaluation.run import Plan, Text, evaluate
from jaxserve.evaluation.sides import Side

__all__ = [
    "MEASURES",
    "Case",
    "EvaluationReport",
    "Floor",
    "NeedleCase",
    "Plan",
    "Side",
    "Text",
    "evaluate",
    "make_needles",
    "read_prompt_set",
]

"""Advice on a server, from what was measured of it: six questions, and rules that name a technique, its
evidence, its price, the setting, and what to watch. A rule that lacks a measurement says which."""

from jaxserve.planning.advice.benchmark_results import BenchmarkRun, parse_runs
from jaxserve.planning.advice.evidence import TECHNIQUES, Evidence, Limits, Technique
from jaxserve.planning.advice.finding import A_SIZE, Advice, Answer, Question, Rule, Setting
from jaxserve.planning.advice.metrics_page import MetricsPage, open_window, parse_page
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.repeats import Divergence, Repeats, find_repeats, split_words
from jaxserve.planning.advice.report import RULES, AdviceReport, advise
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.sources import gather, read_source
from jaxserve.planning.advice.traffic import Traffic, prompt_traffic, read_prompts, trace_traffic

__all__ = [
    "A_SIZE",
    "RULES",
    "TECHNIQUES",
    "Advice",
    "AdviceReport",
    "Answer",
    "BenchmarkRun",
    "Divergence",
    "Evidence",
    "Limits",
    "MetricsPage",
    "NotMeasured",
    "Question",
    "Repeats",
    "Rule",
    "ServerWindow",
    "Setting",
    "Technique",
    "Traffic",
    "advise",
    "find_repeats",
    "gather",
    "open_window",
    "parse_page",
    "parse_runs",
    "prompt_traffic",
    "read_prompts",
    "read_source",
    "split_words",
    "trace_traffic",
]

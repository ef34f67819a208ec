"""Planning: traces of real traffic, a model of what steps cost, and a simulator that joins them to the real
scheduler and loop. No device and no jax."""

from jaxserve.planning.chips import CHIPS, Chip, find_chip
from jaxserve.planning.cost_model import CostModel, Efficiency, StepCost
from jaxserve.planning.footprint import Footprint
from jaxserve.planning.models import MODELS, find_model
from jaxserve.planning.policies import POLICIES
from jaxserve.planning.prompts import PromptMaker
from jaxserve.planning.report import GroupSummary, Spread, Summary, Target, summarise, table
from jaxserve.planning.simulator import Contender, Simulation, SimulationOptions, simulate
from jaxserve.planning.trace_files import read_trace, write_trace
from jaxserve.planning.traces import BLOCK_TOKENS, Trace, TraceRequest
from jaxserve.planning.virtual_engine import VirtualClock, VirtualEngine, virtual_limits

__all__ = [
    "BLOCK_TOKENS",
    "CHIPS",
    "Chip",
    "Contender",
    "CostModel",
    "Efficiency",
    "Footprint",
    "GroupSummary",
    "MODELS",
    "POLICIES",
    "PromptMaker",
    "Simulation",
    "SimulationOptions",
    "Spread",
    "StepCost",
    "Summary",
    "Target",
    "Trace",
    "TraceRequest",
    "VirtualClock",
    "VirtualEngine",
    "find_chip",
    "find_model",
    "read_trace",
    "simulate",
    "summarise",
    "table",
    "virtual_limits",
    "write_trace",
]

"""What a plan is made from and what it comes to: candidates, the demand, and a row for each candidate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxserve.config import FloatFormat
from jaxserve.planning.capacity import Bound
from jaxserve.planning.cost_model import CostModel
from jaxserve.planning.precision import Precision
from jaxserve.planning.report import Target
from jaxserve.planning.traces import Trace
from jaxserve.speculation import DEFAULT_MAX_DRAFTS


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve: the chips of one engine are its cost model's."""

    precision: Precision
    cost: CostModel
    others: FloatFormat
    """Of activations, and of weights that the precision leaves alone."""
    acceptance: float | None = None
    """How likely a draft is accepted; None drafts nothing."""
    max_drafts: int = DEFAULT_MAX_DRAFTS


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is asked of the candidates. Raises ValueError, with the limit, for what is out of range."""

    trace: Trace
    """Who comes; when they come counts only for `rate`."""
    rate: float | None
    """Requests a second to be served; None for as many as one engine serves."""
    all_at_once: bool = False
    """Whether the whole trace is there from the start, and nothing else ever comes."""
    target: Target = field(default_factory=Target)
    attainment: float = 0.95
    """Share of the requests that must keep the target."""
    price: float | None = None
    """Of a chip for an hour, in any currency."""
    num_chips: int | None = None
    """There are; None for as many as it takes."""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"a rate of {self.rate:g} requests a second is not above 0")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"an attainment of {self.attainment:g} is not above 0 and at most 1")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ValueError(f"a price of {self.price:g} is negative or no number")
        for name in ("ttft", "tpot"):
            if not getattr(self.target, name) > 0:
                raise ValueError(f"a {name} limit of {getattr(self.target, name):g} s is not above 0")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shapes of each engine."""

    num_slots: int
    max_chunk: int
    max_model_len: int
    host_seconds: float = 300e-6
    """What the host takes for a step."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where a chip's bytes go. Bytes are of one chip unless said otherwise."""

    chip_bytes: float
    weight_bytes: float
    kv_token_bytes: int
    """Keys and values of a token, all chips together, without padding."""
    page_token_bytes: float
    """What a token's share of its pages really takes, all chips together."""
    sequence_tokens: int
    """Of a long sequence."""
    largest_batch: int
    """Such sequences that there is room for; 0 if not even the weights fit."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one candidate comes to."""

    precision: str
    mesh: int
    """Chips of one engine."""
    axes: str
    """How they share its work, as `--mesh` of a server takes it."""
    acceptance: float | None
    memory: Memory
    bound: Bound
    reason: str = ""
    """Why it cannot serve at all."""
    prefill_seconds: float = math.nan
    """Of a mean prompt that is alone."""
    decode_seconds: float = math.nan
    """Of a token of a sequence that is alone."""
    batch: int = 0
    """Sequences at once: the slots, or those of them that there is room for."""
    batch_decode_seconds: float = math.nan
    """Of a token when so many decode."""
    goodput: float = 0.0
    """Requests a second within the limits, of one engine."""
    saturated: float = 0.0
    """Requests a second without limits, of one engine."""
    engines: int = 0
    """As many as the demand needs, or as there are chips for; 0 if none can serve."""
    serves: bool = False
    """Whether they serve the demand."""
    ttft_p95: float = math.nan
    """Seconds, as is `tpot_p95`, where the demand is spread over the engines."""
    tpot_p95: float = math.nan
    output_rate: float = 0.0
    """Answers' tokens a second, all engines together."""
    cost_per_million: float | None = None
    """Of answers' tokens, at the price given."""

    @property
    def chips(self) -> int:
        return self.mesh * self.engines

    @property
    def mesh_name(self) -> str:
        """The number of chips where they all lie along `tensor`, as usual."""
        return str(self.mesh) if self.axes == f"tensor={self.mesh}" else self.axes

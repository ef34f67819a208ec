"""A plan as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.planning.chips import Chip
from jaxserve.planning.footprint import KV_BYTES, Footprint
from jaxserve.planning.plan_records import Demand, Row, Sizes
from jaxserve.planning.planner import best_row
from jaxserve.planning.report import aligned, finite

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, and all that it was made from."""

    model: str
    footprint: Footprint
    chip: Chip
    kv_format: str
    page_size: int
    demand: Demand
    sizes: Sizes
    rows: Sequence[Row]

    @property
    def best(self) -> Row | None:
        """The row to take; None if none serves the demand."""
        return best_row(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds and bytes; what is not a finite number becomes None."""
        best, demand = self.best, self.demand
        plain: dict[str, Any] = finite(
            {
                "model": {
                    "name": self.model,
                    "parameters": self.footprint.num_parameters,
                    "layers": self.footprint.model.num_layers,
                },
                "kv": {"format": self.kv_format, "page_size": self.page_size, "groups": self._groups()},
                "chip": asdict(self.chip),
                "workload": {**self._lengths(), "rate": demand.rate, "all_at_once": demand.all_at_once},
                "limits": {**asdict(demand.target), "attainment": demand.attainment},
                "price": demand.price,
                "engine": asdict(self.sizes),
                "rows": [asdict(row) | {"chips": row.chips} for row in self.rows],
                "best": None if best is None else self.rows.index(best),
            }
        )
        return plain

    def to_text(self) -> str:
        """What it was made from, a table, why some rows cannot be, and what to take."""
        lines = [
            *self._model_lines(),
            f"workload   {self._workload_line()}",
            f"limits     {self._limits_line()}",
            f"target     {self._chip_line()}",
            f"peaks      {self.chip.source}",
            f"engine     {self.sizes.num_slots} slots, steps of up to {self.sizes.max_chunk} rows, sequences "
            f"of up to {self.sizes.max_model_len} tokens",
            "",
            _table(self.rows, self.demand),
            "",
        ]
        lines += [f"{_label(row)}: {row.reason}" for row in self.rows if row.reason]
        return "\n".join([*lines, self._verdict()])

    def _groups(self) -> list[dict[str, Any]]:
        footprint = self.footprint
        return [
            {
                "window": window,
                "layers": footprint.layers_of(window),
                "token_bytes": footprint.kv_token_bytes(self.kv_format, window),
                "page_token_bytes": footprint.page_bytes(self.kv_format, self.page_size, window)
                / self.page_size,
            }
            for window in footprint.model.windows
        ]

    def _model_lines(self) -> list[str]:
        footprint, model = self.footprint, self.footprint.model
        lines = [
            f"model      {self.model}: {footprint.num_parameters / 1e9:.3f} G parameters, "
            f"{model.num_layers} layers, up to {model.max_position} tokens"
        ]
        scale = " + 4" if KV_BYTES[self.kv_format] == 1 else ""
        for group in self._groups():
            name = f"window of {group['window']}" if group["window"] else "full attention"
            lines.append(
                f"KV         {group['token_bytes']:,} bytes a token ({name}: 2 x {group['layers']} layers x "
                f"{model.num_kv_heads} heads x ({model.head_size} x {KV_BYTES[self.kv_format]}{scale}) in "
                f"{self.kv_format}); on pages of {self.page_size} tokens {group['page_token_bytes']:,.0f}"
            )
        return lines

    def _lengths(self) -> dict[str, float]:
        requests = self.demand.trace.requests
        count = len(requests)
        return {
            "requests": count,
            "prompt_mean": sum(one.prompt_tokens for one in requests) / count,
            "output_mean": sum(one.output_tokens for one in requests) / count,
            "reuse": self.demand.trace.ideal_reuse,
        }

    def _workload_line(self) -> str:
        lengths, demand = self._lengths(), self.demand
        if demand.all_at_once:
            when = "all at once"
        elif demand.rate:
            when = f"{demand.rate:g} a second"
        else:
            when = "as many as one engine serves"
        return (
            f"{lengths['requests']} requests, {when}; in the mean {lengths['prompt_mean']:.0f} tokens of "
            f"prompt, {lengths['reuse']:.0%} of them seen before, and {lengths['output_mean']:.0f} of answer"
        )

    def _limits_line(self) -> str:
        target = self.demand.target
        named = (("TTFT", target.ttft), ("TPOT", target.tpot))
        limits = [f"{name} {_seconds(limit)}" for name, limit in named if limit < math.inf]
        if not limits:
            return "none"
        return f"{', '.join(limits)} for {self.demand.attainment:.0%} of the requests"

    def _chip_line(self) -> str:
        chip = self.chip
        flops = ", ".join(f"{value / 1e12:.4g} TFLOP/s {name}" for name, value in chip.flops.items())
        return (
            f"{chip.name}: {flops}; {chip.memory_bandwidth / 1e9:.4g} GB/s; {chip.memory_bytes / GIB:.1f} GiB"
        )

    def _verdict(self) -> str:
        best = self.best
        if best is None:
            return "none of these serves the workload within the limits"
        engines = f"{best.engines} engine{'s' if best.engines > 1 else ''}"
        return f"take       {_label(best)}: {engines}, {_chips(best.chips)}; bound by {best.bound}"


def _table(rows: Sequence[Row], demand: Demand) -> str:
    head = ["precision", "mesh", "accepted", "weights", "batch", "prefill", "TPOT alone", "in batch"]
    head += ["req/s", "engines", "chips", "TTFT p95", "TPOT p95", "tokens/s"]
    head += ["per M tokens"] if demand.price is not None else []
    lines = [[*head, "bound by"]]
    for row in rows:
        accepted = "-" if row.acceptance is None else f"{row.acceptance:.0%}"
        cells = [row.precision, row.mesh_name, accepted, f"{row.memory.weight_bytes / GIB:.2f} GiB"]
        cells += [str(row.memory.largest_batch), _seconds(row.prefill_seconds)]
        cells += [_seconds(row.decode_seconds), _seconds(row.batch_decode_seconds), f"{row.goodput:.3g}"]
        cells += [str(row.engines) if row.serves else "-", str(row.chips) if row.serves else "-"]
        cells += [_seconds(row.ttft_p95), _seconds(row.tpot_p95), f"{row.output_rate:.4g}"]
        if demand.price is not None:
            cells.append("-" if row.cost_per_million is None else f"{row.cost_per_million:.3f}")
        lines.append([*cells, row.bound])
    return aligned(lines)


def _label(row: Row) -> str:
    drafts = "" if row.acceptance is None else f", drafts of which {row.acceptance:.0%} are accepted"
    along = "" if row.mesh_name.isdecimal() else f" as {row.axes}"
    return f"{row.precision} on {_chips(row.mesh)}{along}{drafts}"


def _chips(number: int) -> str:
    return f"{number} chip{'s' if number > 1 else ''}"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"

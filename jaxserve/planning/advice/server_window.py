"""What a server's metrics say, in the terms of advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.planning.advice.metrics_page import Histogram, MetricsWindow
from jaxserve.planning.advice.missing import NotMeasured

ENOUGH_STEPS = 100
"""Steps of which shares can be told: a tenth is then ten of them, and one more or less no other verdict."""
ENOUGH_ANSWERS = 10
"""Answers of which means can be told; they are of hundreds of steps, as a rule."""
ENOUGH_OF_A_SIZE = 8
"""Steps of one size of which a mean can be told; so many make up the means by which drafts are chosen too."""


@dataclass(frozen=True)
class DraftsSeen:
    """What drafting came to."""

    num_drafts: float
    num_tokens: float
    num_accepted: float
    seconds: float
    """Of the steps that decoded with drafts."""
    plain_seconds: float
    """Of plain steps for as many tokens, as measured."""


class ServerWindow:
    """A running model over some time. Each reader raises NotMeasured for what its pages do not tell."""

    def __init__(self, window: MetricsWindow) -> None:
        self._window = window

    # What it is ------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self._window.label("jaxserve:model_info", "model_name")

    @property
    def device(self) -> str:
        return self._window.label("jaxserve:model_info", "device")

    @property
    def precision(self) -> str:
        """As `float32`, or `int8@2 float32` for a recipe."""
        return self._window.label("jaxserve:model_info", "precision")

    @property
    def kv_format(self) -> str:
        return self._window.label("jaxserve:model_info", "kv_format")

    @property
    def num_slots(self) -> int:
        return int(self._window.gauge("jaxserve:num_slots"))

    @property
    def pool_tokens(self) -> int:
        """That the KV pool holds, of its fullest cache group."""
        config = "vllm:cache_config_info"
        return int(self._window.label(config, "block_size")) * int(
            self._window.label(config, "num_gpu_blocks")
        )

    # How its steps went ----------------------------------------------------------------------------------

    @property
    def num_steps(self) -> float:
        """Steps; raises NotMeasured if they are too few for shares of them."""
        steps = self._window.counter("jaxserve:steps_total")
        if steps < ENOUGH_STEPS:
            raise NotMeasured(f"{ENOUGH_STEPS} steps or more; there were {steps:.0f}")
        return steps

    @property
    def batch(self) -> float:
        """Answers that a step moves on, in the mean."""
        return (self.num_sampled - self.drafts.num_accepted) / self.num_steps

    @property
    def num_sampled(self) -> float:
        return self._window.counter("vllm:generation_tokens_total")

    def kept_out(self, hurdle: str) -> float:
        """Share of the steps that left requests waiting for that."""
        return (
            self._window.by_label("jaxserve:kept_out_steps_total", "hurdle").get(hurdle, 0.0) / self.num_steps
        )

    @property
    def num_running(self) -> int:
        """When the page was made, as are the next two."""
        return int(self._window.gauge("vllm:num_requests_running"))

    @property
    def num_waiting(self) -> int:
        return int(self._window.gauge("vllm:num_requests_waiting"))

    @property
    def kv_usage(self) -> float:
        return self._window.gauge("vllm:kv_cache_usage_perc")

    @property
    def decode_seconds(self) -> Mapping[int, float]:
        """Seconds of a step that only decodes, by the rows that it is compiled for: sizes of enough steps."""
        counts = self._window.by_label("jaxserve:decode_steps_total", "rows")
        seconds = self._window.by_label("jaxserve:decode_step_seconds_total", "rows")
        found = {
            int(rows): seconds[rows] / count for rows, count in counts.items() if count >= ENOUGH_OF_A_SIZE
        }
        if not found:
            raise NotMeasured(f"{ENOUGH_OF_A_SIZE} or more steps of one size that only decode")
        return dict(sorted(found.items()))

    @property
    def mean_decode_seconds(self) -> float:
        """Of all steps that only decode."""
        counts = self._window.counter("jaxserve:decode_steps_total")
        if counts < ENOUGH_OF_A_SIZE:
            raise NotMeasured(f"{ENOUGH_OF_A_SIZE} or more steps that only decode; there were {counts:.0f}")
        return self._window.counter("jaxserve:decode_step_seconds_total") / counts

    # What its requests were ------------------------------------------------------------------------------

    @property
    def num_answers(self) -> float:
        """Answered requests; raises NotMeasured if they are too few for means."""
        answers = self._window.counter("vllm:request_success_total")
        if answers < ENOUGH_ANSWERS:
            raise NotMeasured(f"{ENOUGH_ANSWERS} answers or more; there were {answers:.0f}")
        return answers

    @property
    def prompt_lens(self) -> Histogram:
        return self._of_answers("vllm:request_prompt_tokens")

    @property
    def answer_lens(self) -> Histogram:
        return self._of_answers("vllm:request_generation_tokens")

    @property
    def own_tokens(self) -> float:
        """Tokens of a sequence at its end that it shares with no other, in the mean."""
        computed = self._of_answers("vllm:request_prefill_kv_computed_tokens")
        return computed.mean + self.answer_lens.mean

    @property
    def tpot(self) -> Histogram:
        """Seconds for each token after the first, an answer each."""
        return self._of_answers("vllm:request_time_per_output_token_seconds")

    @property
    def ttft(self) -> Histogram:
        """Seconds to the first token."""
        return self._of_answers("vllm:time_to_first_token_seconds")

    @property
    def num_tenants(self) -> int:
        """That had requests; those that name none are one."""
        return sum(
            count > 0 for count in self._window.by_label("jaxserve:request_tokens_total", "tenant").values()
        )

    @property
    def main_class(self) -> str:
        """The priority class that most answers are of."""
        counts = self._window.by_label("jaxserve:class_time_to_first_token_seconds_count", "class")
        return max(counts, key=lambda name: counts[name])

    @property
    def tpot_target(self) -> float | None:
        """Of that class; None where it has none."""
        try:
            targets = self._window.labelled_gauge("jaxserve:tpot_target_seconds", "class")
        except NotMeasured:
            return None
        return targets.get(self.main_class)

    # What it keeps ---------------------------------------------------------------------------------------

    @property
    def looked_up_tokens(self) -> float:
        """In the prefix cache; 0 where there is none."""
        return self._window.counter("vllm:prefix_cache_queries_total")

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache; 0 where there is none."""
        hits = self._window.counter("vllm:prefix_cache_hits_total")
        return hits / self.looked_up_tokens if self.looked_up_tokens else 0.0

    @property
    def forgotten_share(self) -> float:
        """Pages that were forgotten for each that was stored."""
        stored = self._window.counter("jaxserve:prefix_cache_stored_pages_total")
        return self._window.counter("jaxserve:prefix_cache_evicted_pages_total") / stored if stored else 0.0

    @property
    def num_preemptions(self) -> float:
        return self._window.counter("vllm:num_preemptions_total")

    @property
    def num_recomputed(self) -> float:
        return self._window.counter("jaxserve:recomputed_tokens_total")

    @property
    def recomputed_share(self) -> float:
        """Of all token rows that steps computed, those that preempted samples had computed before."""
        rows = self._window.counter("vllm:iteration_tokens_total_sum")
        return self.num_recomputed / rows if rows else 0.0

    @property
    def drafts(self) -> DraftsSeen:
        counter = self._window.counter
        return DraftsSeen(
            counter("vllm:spec_decode_num_drafts_total"),
            counter("vllm:spec_decode_num_draft_tokens_total"),
            counter("vllm:spec_decode_num_accepted_tokens_total"),
            counter("jaxserve:spec_decode_seconds_total"),
            counter("jaxserve:spec_decode_plain_seconds_total"),
        )

    def _of_answers(self, metric: str) -> Histogram:
        """A histogram that enough answers are in."""
        histogram = self._window.histogram(metric)
        if histogram.count < ENOUGH_ANSWERS:
            raise NotMeasured(
                f"{ENOUGH_ANSWERS} answers or more in {metric}; there were {histogram.count:.0f}"
            )
        return histogram

"""Every metric of a service: its name, what it means, and where its value is read.

Names that begin with `vllm:` mean what they mean in vLLM. All have the label `model_name`, the route's name.
"""

from __future__ import annotations

from jaxserve.scheduling.draft_tally import DRAFTING_STATES
from jaxserve.version import __version__
from server.core.telemetry.family import (
    Family,
    Sample,
    StepRows,
    View,
    by_class,
    class_gauge,
    counter,
    gauge,
    latency,
    one,
)
from server.core.telemetry.prefills import PREFILLS

FINISH_REASONS = ("stop", "length", "abort", "error")


def _cache_config(view: View) -> list[Sample]:
    load, identity = view.load, view.service.identity
    return [((str(load.page_size), str(load.num_pages), identity.kv_format), 1.0)]


def _model_info(view: View) -> list[Sample]:
    identity = view.service.identity
    known = (identity.fingerprint, identity.precision, identity.kv_format, identity.device, __version__)
    return [(known, 1.0)]


def _finished(view: View) -> list[Sample]:
    return [((reason,), view.counts.num_finished[reason]) for reason in FINISH_REASONS]


def _drafting_state(view: View) -> list[Sample]:
    standing = view.snapshot.speculation
    if standing is None:
        return [(("none", "off"), 1.0)]
    return [((standing.drafter, state), float(state == standing.state)) for state in DRAFTING_STATES]


_LOADS = (
    gauge("vllm:num_requests_running", "Samples in slots.", lambda view: view.load.num_running),
    gauge("vllm:num_requests_waiting", "Samples in the queue.", lambda view: view.load.num_waiting),
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the pages that are held, of the fullest cache group; 1 is all.",
        lambda view: view.load.kv_usage,
    ),
    Family(
        "vllm:cache_config_info",
        "gauge",
        "Always 1: tokens on a page, pages, and format of the KV pool.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    Family(
        "jaxserve:model_info",
        "gauge",
        "Always 1: which model answers, in what precision.",
        _model_info,
        ("fingerprint", "precision", "kv_format", "device", "version"),
    ),
    gauge(
        "jaxserve:engine_up",
        "1 while the engine runs, 0 after it has failed.",
        lambda view: float(view.service.engine.failure is None),
    ),
    gauge(
        "jaxserve:draining",
        "1 while new requests are refused because the server shuts down.",
        lambda view: float(view.service.draining),
    ),
    class_gauge(
        "jaxserve:class_requests_running",
        "Samples in slots, by priority class.",
        lambda one: one.num_running,
    ),
    class_gauge(
        "jaxserve:class_requests_waiting",
        "Samples let in and without a slot, by priority class.",
        lambda one: one.num_waiting,
    ),
    gauge("jaxserve:num_slots", "Samples that can run at once.", lambda view: view.load.num_slots),
)

_STEPS = (
    counter(
        "vllm:prompt_tokens",
        "Tokens of prompts that have been read, computed or found in the prefix cache.",
        lambda view: view.snapshot.num_prompt_tokens,
    ),
    counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens of answered requests that were found in the prefix cache instead of computed.",
        lambda view: view.counts.num_cached_tokens,
    ),
    counter(
        "vllm:generation_tokens",
        "Tokens sampled; moves with every step.",
        lambda view: view.snapshot.num_sampled,
    ),
    counter(
        "vllm:prefix_cache_queries",
        "Tokens that were looked up in the prefix cache by requests that then started.",
        lambda view: view.prefixes.query_tokens,
    ),
    counter(
        "vllm:prefix_cache_hits",
        "Of those, the ones that were found there.",
        lambda view: view.prefixes.hit_tokens,
    ),
    counter(
        "jaxserve:prefix_cache_saved_seconds",
        "Device time that computing what was found would have taken, at the measured cost of a token.",
        lambda view: view.prefixes.saved_milliseconds / 1000.0,
    ),
    counter(
        "jaxserve:prefix_cache_stored_pages",
        "Pages of text that could be found from then on.",
        lambda view: view.prefixes.stored_pages,
    ),
    counter(
        "jaxserve:prefix_cache_evicted_pages",
        "Of those, the ones that were forgotten.",
        lambda view: view.prefixes.evicted_pages,
    ),
    counter(
        "jaxserve:swap_saved_pages",
        "Pages of text that preempted samples had written to the host's memory; others are written early.",
        lambda view: view.swaps.saved_pages,
    ),
    counter(
        "jaxserve:swap_restored_pages",
        "Pages of text that were brought back from the host's memory and used.",
        lambda view: view.swaps.restored_pages,
    ),
    counter(
        "jaxserve:swap_damaged_pages",
        "Pages that did not come back as they were written, and were computed again.",
        lambda view: view.swaps.damaged_pages,
    ),
    counter(
        "vllm:spec_decode_num_drafts",
        "Drafts, of one token or several, that a step has verified.",
        lambda view: view.speculation.num_verifications,
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens",
        "Tokens of these drafts.",
        lambda view: view.speculation.num_drafted,
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Of those, the ones that became part of answers.",
        lambda view: view.speculation.num_accepted,
    ),
    gauge(
        "jaxserve:spec_decode_accepted_length",
        "Tokens that the verification of a draft has brought on average; 0 before the first.",
        lambda view: view.speculation.accepted_length,
    ),
    gauge(
        "jaxserve:spec_decode_saved_seconds",
        "Time that drafts have saved decoding against plain steps, by measured step times; below 0 lost.",
        lambda view: view.speculation.seconds_saved,
    ),
    Family(
        "jaxserve:spec_decode_state",
        "gauge",
        "1 for how drafting stands now, else 0: it drafts, times plain steps (measuring), rests as there was "
        "nothing to draft from (no_drafts) or as drafts cost more than they bring (does_not_pay), or is off.",
        _drafting_state,
        ("drafter", "state"),
    ),
    counter(
        "jaxserve:spec_decode_seconds",
        "What steps took that decoded with drafts and did nothing else.",
        lambda view: view.speculation.drafted_seconds,
    ),
    counter(
        "jaxserve:spec_decode_plain_seconds",
        "What plain steps would have taken for as many tokens, by what they were measured to take.",
        lambda view: view.speculation.plain_seconds,
    ),
    counter(
        "vllm:num_preemptions",
        "Times that a running sample gave up its pages, to be fetched or computed again.",
        lambda view: view.snapshot.num_preemptions,
    ),
    counter(
        "jaxserve:recomputed_tokens",
        "Tokens that preempted samples had computed, and did not find again when they went on.",
        lambda view: view.snapshot.num_recomputed,
    ),
    Family(
        "jaxserve:kept_out_steps",
        "counter",
        "Steps that left samples waiting, by what for: slots, pages, tpot_target or rows of the step.",
        lambda view: [((hurdle,), count) for hurdle, count in view.snapshot.num_kept_out.items()],
        ("hurdle",),
    ),
    Family(
        "jaxserve:decode_steps",
        "counter",
        "Steps that did nothing but decode, without drafts, by the rows that they are compiled for.",
        lambda view: [((str(rows),), one.num_steps) for rows, one in view.snapshot.decode_steps.items()],
        ("rows",),
    ),
    Family(
        "jaxserve:decode_step_seconds",
        "counter",
        "What these took, each from the end of the step before it.",
        lambda view: [((str(rows),), one.seconds) for rows, one in view.snapshot.decode_steps.items()],
        ("rows",),
    ),
    Family(
        "vllm:iteration_tokens_total",
        "histogram",
        "Token rows in a step, of prompts and answers.",
        one(lambda view: StepRows(view.snapshot)),
    ),
    counter("jaxserve:steps", "Steps collected from the device.", lambda view: view.snapshot.num_steps),
    Family(
        "jaxserve:host_stage_seconds",
        "counter",
        "What the host loop's wall time went to; the stages sum to it.",
        lambda view: [((stage,), seconds) for stage, seconds in view.snapshot.stage_seconds.items()],
        ("stage",),
    ),
    counter(
        "jaxserve:compiles_after_ready",
        "Programs that the process compiled after its models were ready: faults that somebody waited for.",
        lambda view: view.counts.options.compiles_after_ready(),
    ),
)

_REQUESTS = (
    Family(
        "vllm:request_success",
        "counter",
        "Requests answered, by how they ended.",
        _finished,
        ("finished_reason",),
    ),
    latency(
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token, as the door takes it.",
        lambda latencies: latencies.first_token,
    ),
    latency(
        "vllm:inter_token_latency_seconds",
        "From one delta of a sample to its next, as the door takes them: one for each delta.",
        lambda latencies: latencies.inter_token,
    ),
    latency(
        "vllm:request_time_per_output_token_seconds",
        "Of a request with several tokens, the mean time between two.",
        lambda latencies: latencies.per_token,
    ),
    latency(
        "vllm:e2e_request_latency_seconds", "From arrival to the end.", lambda latencies: latencies.total
    ),
    latency(
        "vllm:request_queue_time_seconds",
        "From the queue's end to the first slot.",
        lambda latencies: latencies.queue,
    ),
    latency(
        "vllm:request_prefill_time_seconds",
        "From the first slot to the first token.",
        lambda latencies: latencies.prefill,
    ),
    latency(
        "vllm:request_decode_time_seconds",
        "From the first token to the end.",
        lambda latencies: latencies.decode,
    ),
    latency(
        "vllm:request_inference_time_seconds",
        "From the first slot to the end.",
        lambda latencies: latencies.inference,
    ),
    latency("vllm:request_prompt_tokens", "Tokens of a prompt.", lambda latencies: latencies.prompt_tokens),
    latency(
        "vllm:request_prefill_kv_computed_tokens",
        "Tokens of a prompt that were not found in the prefix cache.",
        lambda latencies: latencies.computed_tokens,
    ),
    latency(
        "vllm:request_generation_tokens",
        "Tokens of an answer, over its samples.",
        lambda latencies: latencies.answer_tokens,
    ),
    latency(
        "vllm:request_params_n", "Samples that a request asked for.", lambda latencies: latencies.num_samples
    ),
    latency(
        "vllm:request_params_max_tokens",
        "Longest answer that a request asked for, where it named one.",
        lambda latencies: latencies.max_tokens,
    ),
)

_SERVICE = (
    Family(
        "jaxserve:request_refused",
        "counter",
        "Requests that the model never admitted, by why.",
        lambda view: [((status.value,), count) for status, count in view.counts.num_refused.items()],
        ("status",),
    ),
    Family(
        "jaxserve:request_failed",
        "counter",
        "Requests admitted and not answered, by why.",
        lambda view: [((status.value,), count) for status, count in view.counts.num_failed.items()],
        ("status",),
    ),
    Family(
        "jaxserve:admission_rejections",
        "counter",
        "Requests refused for want of room or share, by what was exhausted.",
        lambda view: [((reason,), count) for reason, count in view.counts.num_rejected.items()],
        ("reason",),
    ),
    Family(
        "jaxserve:requests",
        "counter",
        "Requests that have ended or were refused; the outcome is a finish reason or a status.",
        lambda view: view.counts.num_requests.items(),
        ("class", "tenant", "outcome"),
    ),
    Family(
        "jaxserve:request_tokens",
        "counter",
        "Tokens of requests that have ended, by kind: prompt, cached (part of the prompt), generated.",
        lambda view: view.counts.num_tokens.items(),
        ("tenant", "kind"),
    ),
    by_class(
        "jaxserve:class_time_to_first_token_seconds",
        "histogram",
        "From arrival to the first token of an answer that was completed.",
        lambda one: one.first_token,
    ),
    by_class(
        "jaxserve:class_time_per_output_token_seconds",
        "histogram",
        "Mean time between two tokens of an answer.",
        lambda one: one.per_token,
    ),
    by_class(
        "jaxserve:ttft_target_seconds",
        "gauge",
        "Time to the first token that is promised.",
        lambda one: one.targets.ttft,
    ),
    by_class(
        "jaxserve:tpot_target_seconds",
        "gauge",
        "Mean time between two tokens that is promised.",
        lambda one: one.targets.tpot,
    ),
    by_class(
        "jaxserve:judged_requests",
        "counter",
        "Requests that were held against their class's targets: answered, or failed by our fault.",
        lambda one: one.num_judged,
    ),
    by_class(
        "jaxserve:goodput_requests",
        "counter",
        "Of those, the ones that kept every target.",
        lambda one: one.num_good,
    ),
    by_class(
        "jaxserve:goodput_tokens",
        "counter",
        "Tokens sampled for the latter.",
        lambda one: one.num_good_tokens,
    ),
)

FAMILIES = (*_LOADS, *_STEPS, *PREFILLS, *_REQUESTS, *_SERVICE)

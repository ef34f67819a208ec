"""Metrics of prompts that are computed on other devices than answers."""

from __future__ import annotations

from server.core.telemetry.family import Family, counter, gauge

PREFILLS = (
    gauge(
        "jaxserve:prefill_requests",
        "Requests whose prompts are computed apart now, or are computed and wait for a slot.",
        lambda view: view.prefills.num_open,
    ),
    counter(
        "jaxserve:prefill_prompts",
        "Prompts that were computed apart and moved.",
        lambda view: view.prefills.num_prompts,
    ),
    counter(
        "jaxserve:prefill_moved_pages",
        "Pages of these that were moved, those of each cache group counted.",
        lambda view: view.prefills.num_pages,
    ),
    Family(
        "jaxserve:prefill_local_prompts",
        "counter",
        "Prompts of more than a page that were computed where their answers are decoded, by why: all slots "
        "apart were taken, or there were too few pages (slots, pages), or others were before (order).",
        lambda view: [((reason,), count) for reason, count in view.prefills.num_local.items()],
        ("reason",),
    ),
)

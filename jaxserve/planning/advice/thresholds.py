"""From where on a figure is a finding: each with its reason. One that equals its threshold is a finding too,
except for NO_GAIN, which is gain enough."""

from __future__ import annotations

OFTEN = 0.1
"""Share of steps that left requests waiting for one thing. A server with room starts whoever has come with
its next step, and counts nothing; what holds others back in one step of ten is no accident of a burst."""

WORTH_REUSING = 0.1
"""Share of prompt tokens. Less would save less than a tenth of the prefill, which is near to what rounds of a
benchmark differ by: see NO_GAIN."""
REPEATED = 0.2
"""Share of prompts that stood in earlier ones, beyond what they begin with alike. Prompts that have nothing
to do with one another repeat 0.01 of theirs (MT-Bench, Spec-Bench), 0.03 (GSM8K) or 0.11 (HumanEval, which
is code): about twice the most of these."""
HALF_OF_WHAT_IS_POSSIBLE = 0.5
"""Hit rate over what a cache without bounds would have. The prefix cache finds all that its pool holds, so
what is missing was forgotten, or is another tenant's; half is more than a trace and the traffic of the day
should differ by."""
FORGOTTEN = 0.5
"""Pages forgotten for each page stored: every other page that is put by is thrown away again."""

ROOM_LEFT = 0.8
"""Share of the pool's pages in use: above, less than a quarter more slots would find pages."""

PREEMPTED = 0.1
"""Preemptions for each answer: one answer in ten interrupted shows in the 95th percentile of every
latency."""
RECOMPUTED = 0.05
"""Share of computed token rows that had been computed before: device time that brought nothing."""

LARGE_BATCH = 2.0
"""Answers that a step moves on in the mean, from which on a smaller batch is possible at all."""
UNEVEN = 2.0
"""95th percentile of answer lengths over the median: in a batch that waits for its longest answer, most rows
would be idle for half of the time."""
TOGETHER = 0.5
"""Share of requests that come within a second of the one before: then most meet another one in progress."""
STALLED = 1.5
"""Mean time for a token over that of steps that only decode: prompts take a third of an answer's time. It is
also what the scheduler lets prompts make of a step that is beyond its target without them."""
LONG_GAPS = 5.0
"""99th percentile of the gaps between pieces over their median. Sizes of steps are four apart, so a gap of
four is one prompt's ordinary step; above that, several follow one another."""

NO_GAIN = 1.05
"""What a technique must make better by. Rounds of one and the same benchmark differ by up to 6 % from their
mean (benchmarks/results/serving-cpu-2-cores.json): less than 5 % cannot be told from nothing."""
EVEN = 1.0
"""Time of plain steps over that of drafted ones for the same tokens, measured side by side in one process:
below, drafts cost time, and at it they cost the overlap of host and device for nothing."""
ENOUGH_DRAFTS = 50
"""Verified drafts of which that can be told: fewer say more about one text than about drafting."""

"""Scheduler policies that several tests ask for."""

from __future__ import annotations

from jaxserve.scheduling import SchedulerPolicy

UNFORESEEN = SchedulerPolicy(pages_ahead=0.0)
"""The default, but that no page is kept for what answers will need: pools that are small run out."""

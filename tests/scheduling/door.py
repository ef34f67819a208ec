"""The admission gate with a hand on its clock, for tests of who is let in."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.overload import AdmissionGate, OverloadError, Ticket
from jaxserve.scheduling.terms import ServiceTerms


class Door:
    """A gate on a clock that is moved by hand."""

    def __init__(self, settings: dict[str, Any] | None = None, **pool: int) -> None:
        policy = SchedulerPolicy.from_mapping(settings or {})
        self.gate = AdmissionGate(policy, **({"num_slots": 2, "num_pages": 1000, "page_size": 16} | pool))
        self.now = 0.0

    def admit(
        self, tenant: str = "", *, prompt: int = 10, max_tokens: int = 10, num_samples: int = 1, **terms: Any
    ) -> Ticket:
        return self.gate.admit(
            ServiceTerms(tenant=tenant, **terms), prompt, max_tokens, self.now, num_samples=num_samples
        )

    def knock(self, tenant: str = "", **request: Any) -> Ticket | OverloadError:
        try:
            return self.admit(tenant, **request)
        except OverloadError as error:
            return error

    def refused(self, tenant: str = "", **request: Any) -> OverloadError:
        with pytest.raises(OverloadError) as caught:
            self.admit(tenant, **request)
        return caught.value

    def serve(self, count: int, seconds: float, *, num_output: int = 10, **terms: Any) -> None:
        """Answers one after another on one slot, so many seconds each, with others always waiting."""
        crowd = [self.admit(**terms) for _ in range(4)]
        for ticket in crowd[:2]:
            ticket.start(self.now)
        for _ in range(count):
            self.now += seconds
            crowd.pop(0).release(self.now, num_output)
            crowd[1].start(self.now)
            crowd.append(self.admit(**terms))
        for ticket in crowd:
            ticket.release(self.now)

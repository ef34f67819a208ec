"""The running requests as columns of numbers, a row a slot: a step is planned over all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.plan import IntArray
from jaxserve.scheduling.classes import PriorityClass
from jaxserve.scheduling.request import Request

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The requests in K taken slots, and what of theirs stays as it is for as long as they are there."""

    slots: IntArray
    """[K]."""
    serials: npt.NDArray[np.int64]
    """[K] the admissions that hold the slots."""
    requests: list[Request]
    """[K]."""
    accounts: IntArray
    """[K] whom the tokens are charged to; the others as in the table."""
    prepaid: IntArray
    max_known: IntArray
    first_end: IntArray
    ends_at_eos: BoolArray
    has_stop_ids: BoolArray

    def select(self, index: npt.NDArray[np.intp]) -> Cohort:
        """Those of the cohort at these places in it, in its order."""
        if len(index) == len(self.requests):
            return self
        return Cohort(
            self.slots[index],
            self.serials[index],
            [self.requests[place] for place in index.tolist()],
            self.accounts[index],
            self.prepaid[index],
            self.max_known[index],
            self.first_end[index],
            self.ends_at_eos[index],
            self.has_stop_ids[index],
        )


class SlotTable:
    """Which request runs in which slot, and how far it is. A column counts only where a slot is taken.

    *Known* and *computed* are as they will be once every planned step has run.
    """

    def __init__(self, replicas: Sequence[range], page_size: int) -> None:
        """`replicas`: the slots of each, which may be fewer than lie before those of the next."""
        num_slots = replicas[-1].stop

        def column() -> IntArray:
            return np.zeros(num_slots, np.int32)

        self.requests: list[Request | None] = [None] * num_slots
        self.serial = np.full(num_slots, -1, np.int64)
        """The number of the admission that filled the slot; -1 where it is free."""
        self.known = column()
        self.computed = column()
        self.pending = column()
        """Tokens that planned steps will sample and that have not reached the host."""
        self.max_known = column()
        """Known tokens with which the answer has reached its greatest length."""
        self.first_end = column()
        """Known tokens from which on an end-of-sequence id ends the answer."""
        self.capacity = column()
        """Tokens that the pages held can take."""
        self.num_stored = column()
        """Full pages that the prefix cache has been offered."""
        self.next_pass = column()
        """The first position at which a window leaves a page behind."""
        self.ends_at_eos = np.zeros(num_slots, np.bool_)
        self.has_stop_ids = np.zeros(num_slots, np.bool_)
        self.gated = np.zeros(num_slots, np.bool_)
        self.held = np.zeros(num_slots, np.bool_)
        """Gated, and the last token has not been seen."""
        self.account = column()
        """Whom the tokens are charged to."""
        self.prepaid = column()
        """Known tokens up to which the account has been charged in advance."""
        self.rank = column()
        """How urgent the request's class is: 0 is the most."""
        self.tpot_target = np.full(num_slots, np.inf)
        """Seconds between tokens that the class aims at."""
        self.deadline = np.full(num_slots, np.inf)
        """Seconds on the loop's clock."""
        self._page_size = page_size
        self._free = [list(reversed(slots)) for slots in replicas]
        self._replicas = replicas
        self._stride = replicas[1].start if len(replicas) > 1 else num_slots
        self._num_taken = 0
        self._num_given = sum(map(len, replicas))
        self._order: IntArray | None = None
        self._everyone: Cohort | None = None
        self._num_admissions = 0

    def __len__(self) -> int:
        """Taken slots."""
        return self._num_taken

    @property
    def num_slots(self) -> int:
        """Those between two replicas' included."""
        return len(self.requests)

    @property
    def has_free(self) -> bool:
        return self._num_taken < self._num_given

    def has_free_in(self, replica: int) -> bool:
        return bool(self._free[replica])

    def num_taken_in(self, replica: int) -> int:
        return len(self._replicas[replica]) - len(self._free[replica])

    def replica_of(self, slot: int) -> int:
        return slot // self._stride

    @property
    def order(self) -> IntArray:
        """The taken slots, in the order in which their requests are served: by urgency, then by arrival."""
        if self._order is None:
            rank: list[int] = self.rank.tolist()
            taken = [request for request in self.requests if request is not None]
            taken.sort(key=lambda request: (rank[request.slot], request.order))
            self._order = np.array([request.slot for request in taken], np.int32)
        return self._order

    def order_in(self, replica: int) -> IntArray:
        """Those of a replica, in the same order."""
        order = self.order
        return order if len(self._free) == 1 else order[order // self._stride == replica]

    def by_replica(self, slots: IntArray) -> list[IntArray]:
        """Those of each replica among some slots, which keep their order."""
        if len(self._free) == 1:
            return [slots]
        return [slots[slots // self._stride == replica] for replica in range(len(self._free))]

    @property
    def running(self) -> list[Request]:
        """The running requests, in the same order."""
        return [self.at(slot) for slot in self.order.tolist()]

    def running_in(self, replica: int) -> list[Request]:
        """Those of a replica."""
        return [self.at(slot) for slot in self.order_in(replica).tolist()]

    def cohort(self, slots: IntArray) -> Cohort:
        """The requests in taken slots; cheap for `order` itself, until a slot changes hands."""
        if slots is not self._order:
            return self._cohort(slots)
        if self._everyone is None:
            self._everyone = self._cohort(slots)
        return self._everyone

    def in_place(self, cohort: Cohort) -> bool:
        """Whether every request of the cohort has held its slot ever since."""
        if cohort is self._everyone:
            return True
        return bool((self.serial[cohort.slots] == cohort.serials).all())

    def index(self, slots: IntArray) -> IntArray | slice:
        """Selects these slots of a column to write the same to each; of all taken slots, quicker, the whole
        column: what a free slot's says is of no account."""
        return slice(None) if slots is self._order else slots

    def num_arrived(self, slots: IntArray) -> IntArray:
        """Known tokens of each slot that have reached the host."""
        return (self.known - self.pending)[slots]

    def _cohort(self, slots: IntArray) -> Cohort:
        requests: Any = self.requests
        return Cohort(
            slots,
            self.serial[slots],
            list(map(requests.__getitem__, slots.tolist())),
            self.account[slots],
            self.prepaid[slots],
            self.max_known[slots],
            self.first_end[slots],
            self.ends_at_eos[slots],
            self.has_stop_ids[slots],
        )

    def at(self, slot: int) -> Request:
        """The request in a taken slot."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def todo(self) -> IntArray:
        """For each slot the tokens that could be computed now: 0 where it is free, held, or about to end."""
        todo = self.known - self.computed
        todo[(self.known >= self.max_known) | self.held | (self.serial < 0)] = 0
        return todo

    def num_ahead(self, slots: IntArray, num_iterations: int) -> IntArray:
        """Tokens that slots which decode can compute in so many iterations, until their longest answers."""
        return np.minimum(self.max_known[slots] - self.known[slots], num_iterations)

    def enter(
        self, request: Request, replica: int, num_computed: int, account: int, entitled: PriorityClass
    ) -> None:
        """Give a request of the class `entitled` a free slot of a replica."""
        submission = request.submission
        prompt_len = len(submission.prompt)
        slot = request.slot = self._free[replica].pop()
        self._num_taken += 1
        self.requests[slot] = request
        self.serial[slot] = self._num_admissions
        self._num_admissions += 1
        self.known[slot] = request.num_known
        self.computed[slot] = num_computed
        self.pending[slot] = 0
        self.num_stored[slot] = 0
        self.max_known[slot] = prompt_len + submission.max_tokens
        self.first_end[slot] = prompt_len + submission.params.min_tokens
        self.ends_at_eos[slot] = bool(submission.eos_ids)
        self.has_stop_ids[slot] = bool(submission.stop_ids)
        self.gated[slot] = request.gated
        self.held[slot] = False
        self.account[slot] = account
        self.rank[slot] = entitled.rank
        self.tpot_target[slot] = entitled.tpot_target
        deadline = submission.terms.deadline
        self.deadline[slot] = np.inf if deadline is None else deadline
        self.follow_pages(request)
        self._order = self._everyone = None

    def leave(self, request: Request) -> None:
        """Take a request's slot away; tokens under way stay counted with the request."""
        slot = request.slot
        request.num_pending = int(self.pending[slot])
        request.slot = -1
        self.requests[slot] = None
        self.serial[slot] = -1
        self.deadline[slot] = np.inf
        self._free[self.replica_of(slot)].append(slot)
        self._num_taken -= 1
        self._order = self._everyone = None

    def follow_growth(self, request: Request) -> None:
        """The request's page table has grown."""
        self.capacity[request.slot] = request.table.num_spanned * self._page_size

    def follow_pages(self, request: Request) -> None:
        """The request's page table has changed in other ways."""
        self.follow_growth(request)
        self.next_pass[request.slot] = request.table.next_pass

    def check_integrity(self) -> None:
        """Raise RuntimeError unless slots and requests account for one another."""
        taken = [slot for slot, request in enumerate(self.requests) if request is not None]
        for replica, (own, free) in enumerate(zip(self._replicas, self._free, strict=True)):
            taken_here = [slot for slot in taken if self.replica_of(slot) == replica]
            if sorted(free + taken_here) != list(own):
                raise RuntimeError(f"slots {taken_here} are taken and {sorted(free)} free, of {own}")
        for slot in taken:
            request = self.at(slot)
            if request.slot != slot or self.known[slot] != request.num_known + self.pending[slot]:
                raise RuntimeError(f"slot {slot} does not stand as request {request.order} does")

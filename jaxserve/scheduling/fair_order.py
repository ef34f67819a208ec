"""Who is next by fairness: floors, then the starvation bound, then weighted shares, then deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from jaxserve.scheduling.classes import PriorityClass, SchedulerPolicy
from jaxserve.scheduling.fair_shares import Accounts
from jaxserve.scheduling.waiting import Entry, EntryHeap


class FairOrder:
    """Chooses among waiting entries, in this order:

    1. a class that runs in less than its reserved part of the slots in use, the most urgent class first;
    2. the request that is longest past its class's `max_wait`;
    3. the class with the lowest counter among those that wait.

    Within a class preempted requests return first, by arrival; then comes the tenant with the lowest
    counter, and of that tenant's requests the one with the earliest deadline, then the earliest arrived.

    Of the slots in use, and not of all slots: where pages, or the prompt tokens of steps, run out before
    slots do, a class could stay below a part of all slots for good, and would go before everybody.

    The starvation bound: floors never add up to all slots, so each slot beyond them that turns over goes to
    an overdue request while there is one.
    """

    def __init__(self, policy: SchedulerPolicy, accounts: Accounts, num_running: Sequence[int]) -> None:
        """`num_running`: requests in slots by class, kept up to date by the caller."""
        self._accounts = accounts
        self._num_running = num_running
        self._lines = [_ClassLine(index, one, accounts) for index, one in enumerate(policy.classes)]
        self._by_rank = sorted(self._lines, key=lambda line: line.rank)
        self._with_floor = [line for line in self._by_rank if line.reserved]
        self._due = EntryHeap()
        self._level = 0.0
        """Counter of the class served last, the lowest at the time."""

    def enter(self, entry: Entry) -> None:
        """A request comes to wait; it may not be chosen yet."""
        line = self._lines[entry.class_index]
        if not line.num_waiting:
            self._accounts.lift(line.index, self._lowest_level())
        line.enter(entry)

    def exit(self, entry: Entry) -> None:
        """A request, hidden by now, waits no longer."""
        self._lines[entry.class_index].exit(entry)

    def show(self, entry: Entry) -> None:
        """The entry may be chosen."""
        self._lines[entry.class_index].show(entry)
        self._due.push((entry.due, entry.request.order), entry)

    def hide(self, entry: Entry) -> None:
        """The entry, dead by now, may not be chosen any more, though its request may wait on."""
        self._lines[entry.class_index].hide(entry)
        self._due.bury()

    def serve(self, entry: Entry) -> None:
        """The entry, still shown, is the one that starts."""
        line = self._lines[entry.class_index]
        self._level = max(self._level, self._accounts.counter(line.index))
        line.level = max(line.level, self._accounts.counter(entry.account))

    def pick(self, now: float) -> Entry | None:
        """The entry that is next, or None if there is none to choose."""
        for line in self._with_floor:
            if line.num_shown and self.below_floor(line.index):
                return line.head()
        overdue = self._due.peek()
        if overdue is None or overdue.due <= now:
            return overdue
        counter = self._accounts.counter
        best, lowest = None, 0.0
        for line in self._by_rank:
            if line.num_shown and (best is None or counter(line.index) < lowest):
                best, lowest = line, counter(line.index)
        return None if best is None else best.head()

    def below_floor(self, class_index: int) -> bool:
        """Whether a class, with one request more, would still run in no more than its part of the slots."""
        num_slots = sum(self._num_running) + 1
        return self._num_running[class_index] < int(self._lines[class_index].reserved * num_slots)

    def _lowest_level(self) -> float:
        waiting = [self._accounts.counter(line.index) for line in self._lines if line.num_waiting]
        return min(waiting, default=self._level)


class _TenantLine:
    """The new requests of a tenant in a class."""

    __slots__ = ("account", "entries", "listed", "num_waiting")

    def __init__(self, account: int) -> None:
        self.account = account
        self.entries = EntryHeap()
        self.num_waiting = 0
        self.listed = False
        """Whether the class's heap has it."""


class _ClassLine:
    """The requests of one class.

    Counters only grow, so a tenant's place in the heap can only be too far ahead; it is put right when it
    surfaces. That costs a logarithm for each time a counter grew, at most, and mostly nothing.
    """

    def __init__(self, index: int, priority_class: PriorityClass, accounts: Accounts) -> None:
        self.index = index
        self.rank = priority_class.rank
        self.reserved = priority_class.reserved
        """Part of the slots that is the class's before all others'."""
        self.level = 0.0
        """Counter of the tenant served last, the lowest at the time."""
        self.num_waiting = 0
        self.num_shown = 0
        """Waiting requests that may be chosen."""
        self._accounts = accounts
        self._returning = EntryHeap()
        self._tenants: dict[int, _TenantLine] = {}
        self._heap: list[tuple[float, int, _TenantLine]] = []

    def enter(self, entry: Entry) -> None:
        account = entry.account
        tenant = self._tenants.get(account)
        if tenant is None or not tenant.num_waiting:
            front = self._front()  # It may drop the tenant.
            self._accounts.lift(
                account, self.level if front is None else self._accounts.counter(front.account)
            )
            tenant = self._tenants.get(account) or _TenantLine(account)
            self._tenants[account] = tenant
        tenant.num_waiting += 1
        self.num_waiting += 1

    def exit(self, entry: Entry) -> None:
        tenant = self._tenants[entry.account]
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        if not tenant.num_waiting and not tenant.listed:
            del self._tenants[entry.account]

    def show(self, entry: Entry) -> None:
        self.num_shown += 1
        if entry.returns:
            self._returning.push(entry.request.order, entry)
            return
        tenant = self._tenants[entry.account]
        tenant.entries.push(entry.urgency, entry)
        if not tenant.listed:
            tenant.listed = True
            heapq.heappush(self._heap, (self._accounts.counter(entry.account), entry.account, tenant))

    def hide(self, entry: Entry) -> None:
        self.num_shown -= 1
        (self._returning if entry.returns else self._tenants[entry.account].entries).bury()

    def head(self) -> Entry | None:
        """The entry of this class that is next."""
        returning = self._returning.peek()
        if returning is not None:
            return returning
        front = self._front()
        return None if front is None else front.entries.peek()

    def _front(self) -> _TenantLine | None:
        """The tenant with the lowest counter among those with a new request to choose."""
        heap = self._heap
        while heap:
            counter, account, tenant = heap[0]
            if tenant.entries.peek() is None:
                heapq.heappop(heap)
                tenant.listed = False
                if not tenant.num_waiting:
                    del self._tenants[account]
                continue
            current = self._accounts.counter(account)
            if current <= counter:
                return tenant
            heapq.heapreplace(heap, (current, account, tenant))
        return None

"""An engine without a model: it computes answers by hand and checks everything that the host tells it.

A token depends on the last known tokens, its position, the seed and the sample index, so every answer is
known beforehand (`expected_answer`) and no schedule may change it. The "keys and values" that a row writes
on its page are a digest of the sequence up to that row: whoever reads a page finds out whether it holds
exactly its own history. Checks are made in the order of dispatch; results appear only when collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jaxserve.plan import (
    EngineLimits,
    IntArray,
    PageGrant,
    SequencePlan,
    SlotLoad,
    StepHandle,
    StepPlan,
    StepResult,
)
from tests.fake_sequence import FakeSequence, logprob, rank, sample, unpack_mask


class FakeEngineError(Exception):
    """The host has told the engine something that a device would have answered with nonsense."""


class FakePageRead:
    """A copy of pages, which is ready once the steps before it have been collected."""

    def __init__(self, engine: FakeEngine, data: npt.NDArray[np.uint8]) -> None:
        self._engine = engine
        self._due = len(engine.plans)
        self._data = data

    @property
    def ready(self) -> bool:
        return self._engine.num_collected >= self._due

    def take(self) -> npt.NDArray[np.uint8]:
        return self._data


class FakeEngine:
    """A StepEngine, and a PageTransfer. `fail_at`: the index of the step whose collection raises `error`."""

    def __init__(
        self, limits: EngineLimits, *, fail_at: int | None = None, error: Exception | None = None
    ) -> None:
        self._limits = limits
        self._fail_at = fail_at
        self._error = error or RuntimeError("the device has gone")
        self._slots: dict[int, FakeSequence] = {}
        self._written: list[dict[tuple[int, int], int]] = [{} for _ in limits.num_pages]
        """For each group what a (page, offset) holds: the history of the row that wrote it."""
        self._in_flight: deque[tuple[StepHandle, set[tuple[int, int]]]] = deque()
        """Dispatched steps, with the (group, page) that they read or write."""
        self._owners: list[dict[int, Hashable]] = [{} for _ in limits.num_pages]
        """For each group the domain of the sequence that a page was given to."""
        self.domain_of: Callable[[SlotLoad], Hashable] = lambda load: None
        """Sequences of different domains must never read the same page."""
        self._domains: list[Hashable] = []
        """Those that have been seen, by the number that stands for them in a page's bytes."""
        self.num_page_writes = 0
        self.steps_done = 1 << 30
        """Steps that are done before they are collected."""
        self.plans: list[StepPlan] = []
        self.loads: list[SlotLoad] = []

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def config(self) -> EngineLimits:
        """What a device's engine was compiled for."""
        return self._limits

    @property
    def kernels(self) -> Mapping[str, str]:
        """What a device's engine was compiled with."""
        return {"everything": "by hand"}

    @property
    def prefill(self) -> None:
        """What a device's engine has where another computes prompts for it."""
        return None

    def load_slot(self, load: SlotLoad) -> None:
        limits = self._limits
        _require(0 <= load.slot < limits.num_slots, f"slot {load.slot} does not exist")
        _require(
            0 <= load.num_computed < len(load.tokens) < limits.max_model_len,
            f"{load.num_computed} computed of {len(load.tokens)} known tokens",
        )
        _require(len(load.pages) == len(limits.windows), "pages for every cache group")
        domain = self.domain_of(load)
        for group, source, _ in load.copies:
            _require(self._owners[group].get(source) == domain, f"page {source} is of another domain")
        tables: list[dict[int, int]] = []
        for group, pages in enumerate(load.pages):
            tables.append({index: page for index, page in enumerate(pages) if page})
            for index, page in tables[group].items():
                self._check_page(group, page)
                if index < load.num_computed // limits.page_size:
                    owner = self._owners[group].get(page)
                    _require(owner == domain, f"page {page} of group {group} is of another domain")
                self._owners[group][page] = domain
                if index >= load.num_computed // limits.page_size:
                    self._check_unused(group, page)
        for group, source, target in load.copies:
            self._copy_page(group, source, target)
        self._slots[load.slot] = FakeSequence(
            list(load.tokens),
            load.num_prompt_tokens,
            load.num_computed,
            tables,
            load.params,
            load.seed,
            load.sample_index,
            load.eos_token_ids,
            domain,
            1 << 30 if load.max_known is None else load.max_known,
            {} if load.mask is None else {0: unpack_mask(load.mask)},
        )
        self.loads.append(load)

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        places = [0] * len(slots) if ahead is None else ahead.tolist()
        for slot, place, mask in zip(slots.tolist(), places, masks, strict=True):
            _require(slot in self._slots, f"slot {slot} was never filled")
            _require(0 <= place <= self._limits.max_drafts, f"a mask after {place} drafts")
            self._slots[slot].masks[place] = unpack_mask(mask)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self._check_shape(plan)
        for grant in plan.page_grants:
            self._grant(grant)
        used: set[tuple[int, int]] = set()
        drafts = _drafts_by_slot(plan)
        for part in plan.sequences:
            self._check_part(part, drafts[part.slot])
            used |= self._check_history(self._slots[part.slot])
        written: set[tuple[int, int]] = set()
        for part in plan.sequences:
            for draft in drafts[part.slot]:
                self._slots[part.slot].append(draft)
            pages = self._write(part)
            _require(not pages & written, "two sequences of a step write the same page")
            written |= pages
        rows = [row for part in plan.sequences for row in self._compute(part, drafts[part.slot])]
        for _ in range(plan.num_iterations - 1):
            rows += [row for part in plan.sequences for row in self._iterate(part, written)]
        handle = StepHandle(plan, self._result(rows))
        self._in_flight.append((handle, used | written))
        self.plans.append(plan)
        return handle

    def collect(self, handle: StepHandle) -> StepResult:
        _require(bool(self._in_flight) and self._in_flight[0][0] is handle, "steps are collected in order")
        self._in_flight.popleft()
        if self._fail_at is not None and len(self.plans) - len(self._in_flight) > self._fail_at:
            raise self._error
        return handle.device_result

    def is_ready(self, handle: StepHandle) -> bool:
        """Whether a step of a prefill side is done: none is until `steps_done` says so, but by waiting."""
        index = next(n for n, (one, _) in enumerate(self._in_flight) if one is handle)
        return self.num_collected + index < self.steps_done

    @property
    def num_collected(self) -> int:
        return len(self.plans) - len(self._in_flight)

    def share_domains(self, other: FakeEngine) -> None:
        """Number domains as another engine does, so that bytes of pages mean the same to both."""
        self._domains = other._domains

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """A word for each offset's history, and one for whose the page is."""
        return (8 * (self._limits.page_size + 1),) * len(self._limits.windows)

    def read_pages(self, group: int, pages: Sequence[int]) -> FakePageRead:
        size = self._limits.page_size
        words = np.zeros((len(pages), size + 1), np.uint64)
        for row, page in zip(words, pages, strict=True):
            row[:size] = [self._written[group].get((page, offset), 0) for offset in range(size)]
            domain = self._owners[group].get(page)
            if domain not in self._domains:
                self._domains.append(domain)
            row[size] = self._domains.index(domain)
        return FakePageRead(self, words.view(np.uint8))

    def write_pages(self, group: int, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        _require(data.shape == (len(pages), self.page_bytes[group]), f"{data.shape} for {len(pages)} pages")
        for page, row in zip(pages, np.ascontiguousarray(data).view(np.uint64).tolist(), strict=True):
            if not page:
                continue  # The sink, by which transfers are measured.
            self._check_page(group, page)
            self._check_unused(group, page)
            for offset, history in enumerate(row[:-1]):
                self._written[group][page, offset] = history
            self._owners[group][page] = self._domains[row[-1]]
        self.num_page_writes += len(pages)

    def _check_shape(self, plan: StepPlan) -> None:
        shape = plan.shape
        _require(shape in self._limits.decode_shapes + self._limits.chunk_shapes, f"{shape} is not compiled")
        _require(0 < plan.num_rows <= shape.rows, f"{plan.num_rows} rows in {shape}")
        _require(len(plan.sequences) <= shape.sequences, f"{len(plan.sequences)} sequences in {shape}")
        num_logit_rows = sum(part.num_logit_rows for part in plan.sequences)
        _require(num_logit_rows <= shape.logit_rows, f"{num_logit_rows} logit rows in {shape}")
        _require(
            not shape.decode or all(part.num_tokens == 1 for part in plan.sequences),
            f"a chunk in the decode shape {shape}",
        )
        for group in range(len(self._limits.windows)):
            num_grants = sum(grant.group == group for grant in plan.page_grants)
            most = shape.rows * self._limits.max_iterations // self._limits.page_size + shape.sequences
            _require(num_grants <= most, f"{num_grants} grants in group {group} of {shape}")
        _require(len({part.slot for part in plan.sequences}) == len(plan.sequences), "a slot twice in a step")

    def _check_part(self, part: SequencePlan, drafts: list[int]) -> None:
        _require(part.slot in self._slots, f"slot {part.slot} was never filled")
        sequence = self._slots[part.slot]
        todo = len(sequence.tokens) - sequence.num_computed
        if drafts:
            _require(todo == 1, f"drafts after {todo} uncomputed tokens")
            _require(len(drafts) <= self._limits.max_drafts, f"{len(drafts)} drafts")
            _require(part.num_tokens == part.num_logit_rows == 1 + len(drafts), "a row for each draft")
            _require(len(sequence.tokens) + len(drafts) < sequence.max_known, "drafts beyond the longest")
            return
        _require(1 <= part.num_tokens <= todo, f"{part.num_tokens} rows of {todo} uncomputed tokens")
        _require(part.num_logit_rows in (1, part.num_tokens), "logits for the last row, or for all")

    def _grant(self, grant: PageGrant) -> None:
        self._check_page(grant.group, grant.page)
        self._check_unused(grant.group, grant.page)
        table = self._slots[grant.slot].tables[grant.group]
        _require(grant.index not in table, f"page {grant.index} of slot {grant.slot} was granted before")
        table[grant.index] = grant.page
        self._owners[grant.group][grant.page] = self._slots[grant.slot].domain

    def _copy_page(self, group: int, source: int, target: int) -> None:
        self._check_page(group, source)
        self._check_page(group, target)
        self._check_unused(group, target)
        for offset in range(self._limits.page_size):
            written = self._written[group].pop((target, offset), None)
            written = self._written[group].get((source, offset), written)
            if written is not None:
                self._written[group][target, offset] = written

    def _check_page(self, group: int, page: int) -> None:
        _require(0 < page < self._limits.num_pages[group], f"page {page} of group {group} may not be given")

    def _check_unused(self, group: int, page: int) -> None:
        for _, used in self._in_flight:
            _require((group, page) not in used, f"page {page} of group {group} is in use by a step in flight")

    def _check_history(self, sequence: FakeSequence) -> set[tuple[int, int]]:
        """What the next row reads from earlier steps must be the sequence's own past; the pages read."""
        page_size = self._limits.page_size
        read: set[tuple[int, int]] = set()
        for group, window in enumerate(self._limits.windows):
            first = max(0, sequence.num_computed - window + 1) if window else 0
            for position in range(first, sequence.num_computed):
                index, offset = divmod(position, page_size)
                _require(
                    index in sequence.tables[group],
                    f"page {index} of group {group} is read and was never granted",
                )
                page = sequence.tables[group][index]
                found = self._written[group].get((page, offset))
                _require(
                    found == sequence.histories[position],
                    f"page {page} of group {group} does not hold the reader's position {position}",
                )
                read.add((group, page))
        return read

    def _write(self, part: SequencePlan) -> set[tuple[int, int]]:
        sequence = self._slots[part.slot]
        pages: set[tuple[int, int]] = set()
        for group, table in enumerate(sequence.tables):
            for position in range(sequence.num_computed, sequence.num_computed + part.num_tokens):
                index, offset = divmod(position, self._limits.page_size)
                _require(index in table, f"page {index} of group {group} is written and was never granted")
                self._written[group][table[index], offset] = sequence.histories[position]
                pages.add((group, table[index]))
        return pages

    def _compute(self, part: SequencePlan, drafts: Sequence[int] = ()) -> list[tuple[int, int, int]]:
        """Move the sequence on; for each logit row the token after it, its position, its history."""
        sequence = self._slots[part.slot]
        if drafts:
            return self._verify(sequence, len(drafts))
        end = sequence.num_computed + part.num_tokens
        rows: list[tuple[int, int, int]] = []
        for position in range(end - part.num_logit_rows, end):
            if position == len(sequence.tokens) - 1:
                token = sample(sequence, position, self._limits.vocab_size, self._mask(sequence, 0))
                sequence.masks.clear()
                sequence.append(token)
            rows.append((sequence.tokens[position + 1], position, sequence.histories[position]))
        sequence.num_computed = end
        return rows

    def _verify(self, sequence: FakeSequence, num_drafts: int) -> list[tuple[int, int, int]]:
        """The same where the last tokens are drafts; nothing (-1) after the first that is wrong."""
        num_known = len(sequence.tokens) - num_drafts
        rows: list[tuple[int, int, int]] = []
        for place, position in enumerate(range(num_known - 1, len(sequence.tokens))):
            mask = self._mask(sequence, place)
            token = sample(sequence, position, self._limits.vocab_size, mask)
            rows.append((token, position, sequence.histories[position]))
            if sequence.tokens[position + 1 : position + 2] != [token]:
                sequence.cut(position + 1)
                sequence.append(token)
                break
        sequence.num_computed += len(rows)
        sequence.masks.clear()
        return rows + [(-1, 0, 0)] * (1 + num_drafts - len(rows))

    def _mask(self, sequence: FakeSequence, place: int) -> list[int] | None:
        """What may be sampled after so many drafts; None where all may."""
        gated = sequence.params.grammar is not None
        _require(gated == (place in sequence.masks), "a gated sequence has a mask for every token")
        return sequence.masks.get(place)

    def _iterate(self, part: SequencePlan, written: set[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """One more token of a sequence that decodes, unless it has met its end; then nothing (-1)."""
        sequence = self._slots[part.slot]
        _require(sequence.params.grammar is None, "a gated sequence iterates")
        num_output = len(sequence.tokens) - sequence.num_prompt
        ends = set(sequence.params.stop_token_ids)
        if not sequence.params.ignore_eos:
            ends.update(sequence.eos_token_ids)
        ended = sequence.tokens[-1] in ends and num_output >= sequence.params.min_tokens
        if ended or len(sequence.tokens) >= sequence.max_known:
            return [(-1, 0, 0)]
        self._check_history(sequence)
        written |= self._write(part)
        return self._compute(part)

    def _result(self, rows: list[tuple[int, int, int]]) -> StepResult:
        num_top, vocab_size = self._limits.max_logprobs, self._limits.vocab_size
        tops = [[(history + i) % vocab_size for i in range(num_top)] for _, _, history in rows]
        return StepResult(
            tokens=np.array([token for token, _, _ in rows], np.int32),
            logprobs=np.array([logprob(*row) for row in rows], np.float32),
            ranks=np.array([rank(*row, vocab_size) for row in rows], np.int32),
            top_tokens=np.array(tops, np.int32).reshape(len(rows), num_top),
            top_logprobs=np.array(
                [[logprob(top, p, h) for top in t] for (_, p, h), t in zip(rows, tops, strict=True)],
                np.float32,
            ).reshape(len(rows), num_top),
        )


def _drafts_by_slot(plan: StepPlan) -> dict[int, list[int]]:
    """Each sequence's drafts, which must be the last of its rows."""
    if plan.drafts is None:
        return {part.slot: [] for part in plan.sequences}
    ends = np.cumsum(plan.num_logit_rows).tolist()
    _require(len(plan.drafts) == ends[-1], f"drafts for {len(plan.drafts)} of {ends[-1]} logit rows")
    drafts: dict[int, list[int]] = {}
    for part, end in zip(plan.sequences, ends, strict=True):
        rows = plan.drafts[end - part.num_logit_rows : end].tolist()
        drafts[part.slot] = [token for token in rows if token >= 0]
        is_draft = [token >= 0 for token in rows]
        _require(is_draft == sorted(is_draft), f"slot {part.slot}: drafts before known tokens")
    return drafts


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise FakeEngineError(complaint)

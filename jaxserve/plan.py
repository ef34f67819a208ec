"""What the host half and the device half say to each other: plain records over numpy, no jax.

A *slot* is a sequence's row in the device state. The device is the authority on a slot's *known* tokens
(prompt and sampled) and on how many of them are *computed* (their keys and values are in the pool); the
host predicts both exactly one step ahead, which lets it plan a step before it has seen the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

MAX_BIASES = 512
MAX_STOP_IDS = 32
MAX_SEED = 2**63 - 1
ENGINE_DRAFT = -2
"""In place of a draft's token: the engine guesses it itself, where its limits say that it can."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]


@dataclass(frozen=True)
class Grammar:
    """What an answer must be; its tokens are chosen so that it is."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, a JSON list of strings to choose from, or an EBNF grammar, by
    `kind`; nothing for any JSON object."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. The defaults are vLLM's.

    Raises ValueError, naming the value and the limit, for anything out of range.
    """

    n: int = 1
    """Samples for the prompt; they share its pages."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already in the answer, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the answer, in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; at most 512 entries."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, no other token is ever sampled."""
    bad_token_ids: Sequence[int] | None = None
    """Never sampled."""
    min_tokens: int = 0
    """No end-of-sequence or stop token id before so many tokens."""
    max_tokens: int | None = 16
    """Longest answer in tokens; more than the longest sequence leaves is cut to that, None takes it all."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    """End the answer, beside the model's own end-of-sequence ids."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer; never shown unless include_stop_str_in_output."""
    include_stop_str_in_output: bool = False
    seed: int | None = None
    """Same seed, same answer; None draws a fresh one for each request."""
    logprobs: int | None = None
    """Log-probability of each sampled token, and of so many most likely alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """If given, the answer is a text of this grammar, ended where it is complete."""

    def __post_init__(self) -> None:
        _check_range("n", self.n, 1, 1024)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p 0.0 is out of range: it must be above 0 and at most 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, 2**31 - 1)
        if self.logit_bias is not None and len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_BIASES}")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_range(f"logit_bias[{token_id}]", bias, -1e4, 1e4)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise ValueError("allowed_token_ids is empty: no token could be sampled")
        if any(text == "" for text in self.stop_strings):
            raise ValueError("stop holds an empty string")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def permitted_tokens(self, vocab_size: int) -> npt.NDArray[np.uint32] | None:
        """What allowed_token_ids and bad_token_ids leave, in words as of `pack_token_ids`; None if all."""
        if self.allowed_token_ids is None and not self.bad_token_ids:
            return None
        not_bad = ~pack_token_ids(self.bad_token_ids or (), vocab_size)
        if self.allowed_token_ids is None:
            return not_bad
        return pack_token_ids(self.allowed_token_ids, vocab_size) & not_bad

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if any token id that this names lies outside [0, vocab_size)."""
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} has token id {token_id}; the vocabulary has {vocab_size} ids")


def pack_token_ids(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """[ceil(V / 32)] a bit for each of these token ids, the lowest first. Ids are within the vocabulary."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} {value!r} is not a number")
    if isinstance(low, int) and not isinstance(value, Integral):
        raise ValueError(f"{name} {value!r} is not a whole number")
    number: Any = value
    if not low <= number <= high:  # which NaN is not either
        raise ValueError(f"{name} {value} is out of range: it must be from {low} to {high}")


@dataclass(frozen=True)
class StepShape:
    """One rung of the ladder: a compiled step."""

    rows: int
    """Token rows (T)."""
    sequences: int
    """Sequences (S)."""
    logit_rows: int
    """Rows that get logits and a sample (R)."""
    decode: bool = False
    """Whether every sequence has exactly one row, which has its own, cheaper program."""


@dataclass(frozen=True, slots=True)
class PageGrant:
    """From this step on, the slot's `index`-th page in cache group `group` is `page`."""

    group: int
    slot: int
    index: int
    page: int


class SequencePlan(NamedTuple):
    """One sequence's part in a step: its next `num_tokens` tokens after the computed ones."""

    slot: int
    num_tokens: int
    num_logit_rows: int = 1
    """How many of the last of these rows get logits: 1, or all for prompt log-probs."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One device call, as arrays over its S sequences, those of the first replica before those of the next.

    Logit rows come back in the order of the sequences, each one's rows ascending.
    """

    slots: IntArray
    """[S]."""
    num_tokens: IntArray
    """[S] rows of each sequence."""
    num_logit_rows: IntArray
    """[S] of these, the last that get logits."""
    grants: IntArray
    """[X, 4] page grants: group, slot, index, page."""
    shape: StepShape
    num_iterations: int = 1
    """How many tokens each sequence computes one after another, in a step of a decode shape. Pages must be
    granted for all of them, up to what the slot's `max_known` leaves."""
    drafts: IntArray | None = None
    """[logit rows] the token of each that is a draft, or ENGINE_DRAFT; -1 for the others; None in a step
    without any.

    A sequence's drafts are the last of its rows, after its last known token's, whose logits are asked for
    too. Each is sampled after as if it were known, and is so, and its row computed, while it is what was
    sampled after the row before it: the sequence moves on by these and one more."""
    unread: IntArray | None = None
    """[S] computed tokens that a draft model reads first, -1 for all where it leaves the sequence out."""
    reads: IntArray | None = None
    """[X, 3] what a draft model reads before the step: slot, first position, number of computed tokens."""

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan], grants: Sequence[PageGrant], shape: StepShape) -> StepPlan:
        """A plan from records, for whoever makes one by hand."""
        columns = np.array(sequences, np.int32).reshape(-1, 3)
        rows = [(grant.group, grant.slot, grant.index, grant.page) for grant in grants]
        granted = np.array(rows, np.int32).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], granted, shape)

    @functools.cached_property
    def num_rows(self) -> int:
        return int(self.num_tokens.sum())

    @property
    def sequences(self) -> list[SequencePlan]:
        """The same as records, for whoever looks at single ones."""
        columns = (self.slots.tolist(), self.num_tokens.tolist(), self.num_logit_rows.tolist())
        return [SequencePlan(*row) for row in zip(*columns, strict=True)]

    @property
    def page_grants(self) -> list[PageGrant]:
        return [PageGrant(*row) for row in self.grants.tolist()]


@dataclass(frozen=True)
class SlotLoad:
    """Fill a slot: the whole known text, where to start computing, how to sample."""

    slot: int
    tokens: Sequence[int]
    """All known tokens: the prompt, then whatever has been sampled so far."""
    num_prompt_tokens: int
    num_computed: int
    """Tokens whose keys and values already lie in `pages` (shared with another sequence)."""
    pages: tuple[tuple[int, ...], ...]
    """For each cache group the slot's first pages, at index 0 and up; 0 where it has none."""
    params: SamplingParams
    seed: int
    sample_index: int
    eos_token_ids: tuple[int, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    """Pages to copy before the slot is used, at most one a group: group, source, target."""
    mask: npt.NDArray[np.uint32] | None = None
    """[ceil(V / 32)] the tokens that its grammar lets come next, as in `StepEngine.load_masks`."""
    max_known: int | None = None
    """Known tokens with which the answer is at its longest; None for the longest sequence."""


@dataclass(frozen=True)
class StepResult:
    """What one step sampled, a row for each of the plan's logit rows, and of several iterations as many times
    these, the first iteration's first."""

    tokens: IntArray
    """[rows] the token sampled after each row, or the already known next token; -1 in the iterations that a
    sequence takes no part in, having met its end or its longest, and after a draft that was not accepted."""
    logprobs: FloatArray
    """[rows] its log-probability (natural), if any request in the step asked; else undefined."""
    ranks: IntArray
    """[rows] its 1-based rank in the vocabulary, likewise."""
    top_tokens: IntArray
    """[rows, max_logprobs] the most likely tokens, likewise."""
    top_logprobs: FloatArray
    """[rows, max_logprobs] their log-probabilities."""


@dataclass(frozen=True)
class EngineLimits:
    """What a scheduler must know of an engine. Shapes are sorted by rows."""

    num_slots: int
    """Of all replicas: those of the first, then those of the next."""
    max_model_len: int
    page_size: int
    num_pages: tuple[int, ...]
    """Pages of each cache group in each replica; page 0 is never given out."""
    windows: tuple[int, ...]
    """Each group's sliding window in tokens, 0 for full attention."""
    vocab_size: int
    decode_shapes: tuple[StepShape, ...]
    chunk_shapes: tuple[StepShape, ...]
    max_logprobs: int
    eos_token_ids: tuple[int, ...] = ()
    copies_pages: bool = False
    """Whether a slot's load may copy pages, so that one can start inside a page of another."""
    max_iterations: int = 1
    """Most iterations of a step of a decode shape."""
    max_drafts: int = 0
    """Most drafts of a sequence in a step, of a chunk shape."""
    drafts_itself: bool = False
    """Whether it can guess drafts itself."""
    draft_reads: int = 0
    """Most tokens that its draft model reads before a step; 0 where it has none."""
    num_replicas: int = 1
    """Parts of the slots with pages of their own; a shape holds what a step has of any one of them."""

    @property
    def decoding_shapes(self) -> tuple[StepShape, ...]:
        """Of steps that only decode: where none are made for that, those of prompts as far as slots go."""
        num_slots = self.num_slots // self.num_replicas
        num_smaller = sum(shape.rows < num_slots for shape in self.chunk_shapes)
        return self.decode_shapes or self.chunk_shapes[: num_smaller + 1]

    @property
    def longest_lag(self) -> int:
        """Tokens by which a sequence that met its end within a step may be behind where the host had it go;
        until the host learns of it, the sequence reads what such a one reads."""
        return self.max_iterations - 1

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence may have, also if the pool holds less than `max_model_len`."""
        pools = [
            (pages - 1) * self.page_size + 1  # The last sampled token is never computed: it needs no room.
            for window, pages in zip(self.windows, self.num_pages, strict=True)
            if window == 0
        ]
        return min([self.max_model_len, *pools])

    def longest_answer(self, prompt_len: int, max_tokens: int | None) -> int:
        """Tokens that an answer may have at most: of `max_tokens`, or for None of all that there is room for,
        and 1 at least: a prompt that leaves no room is refused for that."""
        if max_tokens is None:
            return max(self.longest_sequence - prompt_len, 1)
        return min(max_tokens, self.max_model_len - prompt_len)

    def fit(self, rows: int, sequences: int, logit_rows: int, decode: bool) -> StepShape:
        """The smallest compiled shape that holds a step; `decode` if no sequence has a second row."""
        for shape in (self.decode_shapes if decode else ()) + self.chunk_shapes:
            if shape.rows >= rows and shape.sequences >= sequences and shape.logit_rows >= logit_rows:
                return shape
        raise ValueError(
            f"no compiled step holds {rows} rows, {sequences} sequences, {logit_rows} logit rows"
        )


@dataclass
class StepHandle:
    """A step in flight: opaque to the host half, handed back to `collect` once, in order."""

    plan: StepPlan
    device_result: Any = field(repr=False)


class StepEngine(Protocol):
    """The device half as the host loop sees it. The real engine and the test's fake one are these."""

    @property
    def limits(self) -> EngineLimits: ...

    def load_slot(self, load: SlotLoad) -> None:
        """Fill a slot before the first step that uses it. Asynchronous, in order with dispatches."""
        ...

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        """From the next dispatch on these slots sample only these tokens.

        Args:
            slots: [S], each once, or once for each of `ahead`.
            masks: [S, ceil(V / 32)] a bit for each token, the lowest first (`pack_token_ids`). What a
                request's own allowed and bad token ids withhold stays withheld; its min_tokens yields where
                only its end may come. A slot's next load ends its mask.
            ahead: [S] after how many of the slot's drafts the mask holds, up to `max_drafts`; by default
                after none. Whoever lets a slot with masks verify drafts gives one for each of its rows.

        Asynchronous, in order with dispatches.
        """
        ...

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once."""
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and bring its result to the host: the only transfer."""
        ...

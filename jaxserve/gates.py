"""Requests whose every token must be of a grammar: which tokens may come next is worked out off the loop, but
for what may follow drafts.

A gated request computes nothing from the moment that it samples a token until its mask for the next one has
been made; everybody else goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.plan import Grammar, SamplingParams, SlotLoad, StepEngine
from jaxserve.scheduling import Request, ScheduledStep, Scheduler, Submission

MaskWords = npt.NDArray[np.uint32]


class TokenMatcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token_id: int) -> None:
        """Follow a sampled token. Raises ValueError if the grammar has no such continuation."""
        ...

    def mask(self) -> MaskWords:
        """[ceil(V / 32)] a bit for each token that may come next, lowest first; none if all is said.

        Raises ValueError where the text can neither go on nor end.
        """
        ...

    def copy(self) -> TokenMatcher:
        """Another one at the same place."""
        ...


class MatcherFactory(Protocol):
    def matcher(self, params: SamplingParams, eos_token_ids: Sequence[int] = ()) -> TokenMatcher: ...


class GrammarSource(Protocol):
    """Makes matchers of grammars; `jaxserve.structured.GrammarCompiler` is one."""

    def compile(self, grammar: Grammar) -> MatcherFactory:
        """A grammar, compiled now or before.

        Raises ValueError for one that cannot be followed, `jaxserve.structured.CheckLostError` where that
        could not be found out now.
        """
        ...


class Refusal(NamedTuple):
    """A gated request that cannot go on."""

    request: Request
    reason: str | None
    """Why, if it is a fault; None where the grammar's text is complete and nothing can end it."""


class GrammarGates:
    """The matchers and masks of gated requests. Its owner's thread only; the work is on one of its own."""

    def __init__(self, engine: StepEngine, scheduler: Scheduler, source: GrammarSource | None) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self.source = source
        self._matchers: dict[Request, TokenMatcher] = {}
        self._masks: dict[Request, MaskWords] = {}
        """For each the tokens that it may sample next; absent while that is worked out."""
        self._ahead: dict[Request, list[MaskWords]] = {}
        """For those that may verify drafts in the step being planned the tokens that may come after each."""
        self._seen: dict[Request, list[int]] = {}
        """Tokens that have been sampled since the worker was last told."""
        self._batches: list[Future[list[tuple[Request, MaskWords | str]]]] = []
        self._worker: ThreadPoolExecutor | None = None
        if scheduler.drafting is not None:
            scheduler.drafting.trim = self.trim

    @property
    def pending(self) -> bool:
        """Whether masks are being worked out."""
        return bool(self._batches)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for a grammar that is malformed, or that this loop cannot follow.

        Thread-safe: whoever asks spends the time that compiling takes, and not the loop.
        """
        if params.grammar is None:
            return
        if self.source is None:
            raise ValueError(f"grammar of kind {params.grammar.kind}: this engine was given no grammars")
        self.source.compile(params.grammar)

    def start(self, params: SamplingParams) -> TokenMatcher | None:
        """The matcher of a new, checked request; None without a grammar."""
        if params.grammar is None:
            return None
        assert self.source is not None, "the request has been checked"
        return self.source.compile(params.grammar).matcher(params, self._scheduler.limits.eos_token_ids)

    def open(self, submission: Submission, matcher: TokenMatcher) -> None:
        """Gate the samples of a submission, all at the matcher's place."""
        mask = matcher.mask()
        for request in submission.requests:
            self._matchers[request] = matcher.copy()
            self._masks[request] = mask

    def close(self, request: Request) -> None:
        """A request has ended."""
        for of_request in (self._matchers, self._masks, self._ahead, self._seen):
            of_request.pop(request, None)

    def dress(self, load: SlotLoad, request: Request) -> SlotLoad:
        """A gated request's load with the mask of its next token."""
        return replace(load, mask=self._masks[request]) if request in self._masks else load

    def trim(self, request: Request, tokens: list[int]) -> list[int]:
        """As many of a gated request's drafts as its grammar lets come one after another."""
        mask = self._masks.get(request)
        if mask is None or tokens[0] < 0:  # What the engine guesses is not known.
            return []
        matcher = self._matchers[request].copy()
        masks = self._ahead[request] = []
        for token in tokens:
            if not mask[token >> 5] >> (token & 31) & 1:
                break
            try:
                matcher.accept(token)
                mask = matcher.mask()
            except ValueError:  # A dead end, for plain decoding to meet.
                break
            if not mask.any():
                break
            masks.append(mask)
        return tokens[: len(masks)]

    def mask_drafts(self, step: ScheduledStep) -> None:
        """Before a step is dispatched: what may come after each draft of those that are gated."""
        if step.num_drafts is not None and self._ahead:
            slots, ahead, masks = [], [], []
            for request, num_drafts in zip(step.cohort.requests, step.num_drafts.tolist(), strict=True):
                walked = self._ahead.get(request, [])[:num_drafts]
                slots += [request.slot] * len(walked)
                ahead += range(1, 1 + len(walked))
                masks += walked
            if slots:
                self._engine.load_masks(np.array(slots, np.int32), np.stack(masks), np.array(ahead, np.int32))
        self._ahead.clear()

    def see(self, request: Request, token: int) -> None:
        """A gated request that goes on has sampled a token; after accepted drafts there are several."""
        request.held = True
        self._masks.pop(request, None)
        self._seen.setdefault(request, []).append(token)

    def work(self) -> None:
        """Begin to work out the masks after the tokens seen since the last call."""
        if not self._seen:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "jaxserve-grammars")
        seen = [(request, self._matchers[request], tokens) for request, tokens in self._seen.items()]
        self._batches.append(self._worker.submit(_follow, seen))
        self._seen = {}

    def release(self, *, wait: bool = False) -> list[Refusal]:
        """Let those go on whose masks are ready; return those that cannot. `wait`: until one batch is."""
        refusals: list[Refusal] = []
        ready: list[tuple[int, MaskWords]] = []
        while self._batches and (wait or self._batches[0].done()):
            wait = False
            for request, mask in self._batches.pop(0).result():
                if request not in self._matchers:
                    continue  # It has ended meanwhile.
                if isinstance(mask, str) or not mask.any():
                    refusals.append(Refusal(request, mask if isinstance(mask, str) else None))
                    continue
                self._masks[request] = mask
                if request.slot >= 0:
                    ready.append((request.slot, mask))
                self._scheduler.resume(request)
        if ready:
            slots = np.array([slot for slot, _ in ready], np.int32)
            self._engine.load_masks(slots, np.stack([mask for _, mask in ready]))
        return refusals

    def shut(self) -> None:
        """Nothing more will be asked."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)


def _follow(seen: list[tuple[Request, TokenMatcher, list[int]]]) -> list[tuple[Request, MaskWords | str]]:
    """For each request the mask after its tokens, or why there is none."""
    masks: list[tuple[Request, MaskWords | str]] = []
    for request, matcher, tokens in seen:
        try:
            for token in tokens:
                matcher.accept(token)
            masks.append((request, matcher.mask()))
        except ValueError as error:
            masks.append((request, str(error)))
    return masks

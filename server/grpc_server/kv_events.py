"""The prefix cache's gains and losses as the gateways' protocol streams them, for routing by prefix."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from jaxserve.scheduling import CacheScope, KvSnapshot
from jaxserve.scheduling.kv_events import (
    CacheCleared,
    KvEvent,
    KvEventBatch,
    KvEventLog,
    PagesRemoved,
    PagesStored,
)
from server.core import Service, ServiceError, Status

_LOOK_UP = 0.5
"""Seconds after which a stream without events looks whether the server goes away."""
_MAX_BATCHES = 256
_MAX_CHUNK_TOKENS = 200_000
"""Of a snapshot's message: far below what clients accept at once, 4 MiB."""


class EventWriter:
    """Writes events as one subscriber may see them.

    With tenants, what others share among themselves stays unseen: it is their prompts. Of what is removed
    there are only hashes, and those that a subscriber does not know are nothing to it.
    """

    def __init__(self, own: CacheScope, *, sees_all: bool) -> None:
        """own: where requests of the subscriber share if they name no namespace."""
        self._own = own
        self._sees_all = sees_all
        self._num_events = 0

    def batch(self, batch: KvEventBatch) -> pb.KvEventBatch:
        """A batch, empty where there is nothing to see: the numbers have no gap."""
        events = [written for event in batch.events if (written := self._event(event)) is not None]
        return pb.KvEventBatch(
            sequence_number=batch.sequence_number, timestamp=batch.timestamp, events=events, dp_rank=0
        )

    def snapshot(self, snapshot: KvSnapshot) -> Iterator[pb.KvEventBatch]:
        """All that there is, after which the next batch follows; numbered up to the snapshot's own number."""
        visible = [event for event in snapshot.events if self._sees(event)]
        chunks = _chunks(visible, most=max(1, snapshot.sequence_number))
        num_pages = sum(len(event.hashes) for event in visible)
        for index, chunk in enumerate(chunks):
            events = [] if index else [pb.KvCacheEvent(cleared=pb.KvCacheCleared())]
            events += [pb.KvCacheEvent(stored=self._stored(event)) for event in chunk]
            yield pb.KvEventBatch(
                sequence_number=snapshot.sequence_number - len(chunks) + 1 + index,
                events=events,
                dp_rank=0,
                snapshot=pb.KvSnapshotChunk(index=index, count=len(chunks), blocks=num_pages),
            )

    def _event(self, event: KvEvent) -> pb.KvCacheEvent | None:
        if isinstance(event, PagesStored) and not self._sees(event):
            return None
        self._num_events += 1
        written = pb.KvCacheEvent(event_id=self._num_events)
        match event:
            case PagesStored():
                written.stored.CopyFrom(self._stored(event))
            case PagesRemoved(hashes):
                written.removed.block_hashes.extend(hashes)
            case CacheCleared():
                written.cleared.SetInParent()
        return written

    def _sees(self, event: PagesStored) -> bool:
        return self._sees_all or event.domain.scope == self._own

    def _stored(self, event: PagesStored) -> pb.KvBlocksStored:
        scope = event.domain.scope
        pairs = zip(event.hashes, event.token_ids, strict=True)
        return pb.KvBlocksStored(
            blocks=[
                pb.KvBlock(block_hash=key, token_ids=ids, block_size=event.page_size) for key, ids in pairs
            ],
            parent_block_hash=event.parent_hash,
            tier=pb.KV_CACHE_TIER_DEVICE,
            locality=pb.KV_CACHE_LOCALITY_LOCAL,
            lora_name=event.domain.adapter,
            cache_salt=None if scope == self._own else _salt(scope),
        )


async def kv_event_batches(
    service: Service, start: int, writer: EventWriter
) -> AsyncGenerator[pb.KvEventBatch]:
    """What has happened from a batch's number on, and what happens, until the server goes away.

    Who starts at 0, or has missed so much that it is not kept any more, or knows of numbers that are yet to
    come and so of another life of the server, gets all that there is first. Raises ServiceError,
    UNIMPLEMENTED, where no prefix is reused.
    """
    log = service.engine.kv_events
    if log is None:
        raise ServiceError(Status.UNIMPLEMENTED, "this server reuses no prefix: it has no cache events")
    news = asyncio.Event()
    stop_listening = log.listen(_waker(news))
    try:
        reached = start
        while service.ready:
            news.clear()
            if reached == 0 or _is_lost(log, reached):
                snapshot = await service.snapshot_prefixes()
                # Nothing has ever happened, and the subscriber thinks so too.
                chunks = () if reached == snapshot.sequence_number == 0 else writer.snapshot(snapshot)
                for chunk in chunks:
                    yield chunk
                reached = snapshot.sequence_number + 1
            page = log.read(reached, _MAX_BATCHES)
            if page.num_missed:
                continue
            for batch in page.batches:
                yield writer.batch(batch)
            reached += len(page.batches)
            if not page.batches:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _LOOK_UP)
    finally:
        stop_listening()


def _is_lost(log: KvEventLog, start: int) -> bool:
    """Whether a subscriber cannot go on from where it was."""
    return start > log.last_sequence_number + 1 or log.read(start, 1).num_missed > 0


def _waker(news: asyncio.Event) -> Callable[[], None]:
    """What the engine's thread calls after every batch."""
    event_loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # The event loop is closed: nobody listens any more.
            event_loop.call_soon_threadsafe(news.set)

    return wake


def _salt(scope: CacheScope) -> str:
    """What tells a scope's pages from the subscriber's own."""
    return scope.name if scope.kind == "namespace" else f"{scope.kind}:{scope.name}"


def _chunks(events: Iterable[PagesStored], most: int) -> Sequence[Sequence[PagesStored]]:
    """Cut into messages of some size, at least one and at most so many."""
    chunks: list[list[PagesStored]] = [[]]
    num_tokens = 0
    for event in events:
        num_event = len(event.hashes) * event.page_size
        if num_tokens and num_tokens + num_event > _MAX_CHUNK_TOKENS and len(chunks) < most:
            chunks.append([])
            num_tokens = 0
        chunks[-1].append(event)
        num_tokens += num_event
    return chunks

"""What a route says of its drafts: in a receipt, and in its metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jaxserve.speculation import Speculation
from server.core import GenerateRequest, RequestRecord, Service
from server.core.telemetry.families import FAMILIES
from server.core.telemetry.family import Value, View
from tests.drafters import foreseeing
from tests.fake_model import fake_limits
from tests.server.harness import ENDLESS, TOKENIZER, PacedEngine, answer, expected, serving

ASK = GenerateRequest(text="hello", params=ENDLESS)


def samples(service: Service) -> dict[tuple[str, ...], Value]:
    """The values of the metrics about drafting, by name and labels."""
    view = View(service, service.load(), service.engine.snapshot())
    families = [family for family in FAMILIES if "spec_decode" in family.name]
    return {(family.name, *labels): value for family in families for labels, value in family.read(view)}


def test_a_route_that_drafts_says_what_that_has_brought() -> None:
    text = [*TOKENIZER.encode("hello"), *expected("hello", ENDLESS)]
    speculation = Speculation(
        drafter=foreseeing([text], 258), max_drafts=4, adaptive=False, name="foreseeing"
    )
    records: list[RequestRecord] = []

    async def main() -> None:
        device = PacedEngine(replace(fake_limits(), max_drafts=4))
        async with serving(device, speculation=speculation) as (service, _):
            service.observers.append(records.append)
            tokens = await answer(service, ASK)
            assert tokens == expected("hello", ENDLESS)
            receipt, snapshot = records[0].receipt, service.engine.snapshot()
            assert receipt is not None
            assert snapshot.speculation is not None
            assert (receipt.drafter, receipt.drafting_state) == ("foreseeing", "drafting")
            assert 0 < receipt.accepted_tokens < receipt.drafted_tokens == snapshot.speculation.num_drafted
            # A token comes with each step, and one with each accepted draft.
            assert snapshot.num_steps == len(tokens) - receipt.accepted_tokens
            shown = samples(service)
            num_drafts = shown["vllm:spec_decode_num_drafts",]
            assert isinstance(num_drafts, int)
            assert shown["vllm:spec_decode_num_accepted_tokens",] == receipt.accepted_tokens
            length = 1 + receipt.accepted_tokens / num_drafts
            assert shown["jaxserve:spec_decode_accepted_length",] == pytest.approx(length)
            assert receipt.accepted_length == pytest.approx(length, abs=1e-3)
            assert shown["jaxserve:spec_decode_state", "foreseeing", "drafting"] == 1.0
            assert shown["jaxserve:spec_decode_state", "foreseeing", "does_not_pay"] == 0.0

    asyncio.run(main())


def test_a_route_that_does_not_says_that() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        async with serving() as (service, _):
            service.observers.append(records.append)
            await answer(service, ASK)
            assert samples(service)["jaxserve:spec_decode_state", "none", "off"] == 1.0
        receipt = records[0].receipt
        assert receipt is not None
        assert (receipt.drafter, receipt.drafting_state, receipt.drafted_tokens) == ("", "", 0)

    asyncio.run(main())

"""Groups that decode in turn on the stages of a pipeline answer as one device does, at the cost of a tick."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxserve.engine.build import resolve_config
from jaxserve.engine.options import EngineOptions
from sharding import parse_mesh
from tests.sharding.eight import report_of
from tests.sharding.groups import ABORTED, ENOUGH, MODELS
from tests.sharding.margins import SURE, parting

PAIRS = [(name, mesh) for name, case in MODELS.items() for mesh in case.meshes]


@functools.cache
def report(name: str) -> Any:
    """What `tests.sharding.groups` says."""
    return report_of("tests.sharding.groups", name)[name]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["overlapped", "plain"])
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_answers_are_those_of_one_device(name: str, mesh: str, loop: str) -> None:
    alone, spread = report(name)["alone"][loop], report(name)[mesh][loop]
    assert report(name)[mesh]["groups"] == int(mesh[-1])
    assert report(name)[mesh]["in turn"] > 20
    assert len(alone) == len(spread) == 14
    for number, (one, other) in enumerate(zip(alone, spread, strict=True)):
        parted = parting(one["tokens"], other["tokens"], strict=False)
        if parted is not None:
            # Those without log-probabilities are sampled, and have no margins to allow for.
            assert one["margins"][parted] < SURE
        elif number == ABORTED:
            assert other["reason"] == "abort"
            assert len(other["tokens"]) >= ENOUGH
        else:
            assert (one["tokens"], one["text"], one["reason"]) == (
                other["tokens"],
                other["text"],
                other["reason"],
            )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_who_is_under_way_is_waited_for_whatever_the_host_says(name: str, mesh: str) -> None:
    tokens = report(name)["alone"]["again"]
    assert len(set(tokens)) > 2
    assert report(name)[mesh]["again"] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_answers_end_in_every_way(name: str) -> None:
    ends = {(sample["reason"], len(sample["tokens"]) > 1) for sample in report(name)["alone"]["plain"]}
    assert {("stop", True), ("length", True), ("length", False)} <= ends


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [pair for pair in PAIRS if MODELS[pair[0]].num_pages < 40])
def test_requests_gave_way_while_groups_were_under_way(name: str, mesh: str) -> None:
    assert report(name)[mesh]["overlapped preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2), ids=["two stages", "four stages"])
def test_a_tick_reads_weights_once_and_moves_one_group(number: int) -> None:
    through_all, tick = report("programs")[2 * number : 2 * number + 2]
    stages = tick["stages"]
    assert (through_all["groups"], tick["groups"]) == (1, stages)
    # Every product has a matrix of its own, four in each of a stage's three layers, and the head; or is one
    # of the two of attention.
    assert tick["layer loops"] == 1
    assert tick["products"] == 4 * 3 + 2 + 1
    assert through_all["layer loops"] == stages
    assert through_all["products"] == stages * (4 * 3 + 2) + 1
    # To the neighbour goes one group's hidden states.
    hidden = 4 * 48 * 4
    assert tick["moves"] == [[hidden, 1]]
    assert through_all["moves"] == [[hidden, stages - 1]]
    assert max(tick["other bytes"]) == hidden
    # The pool is in place.
    assert tick["temporaries"] <= through_all["temporaries"] < tick["pool"] < tick["aliased"]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, 4),
        ({"decode_groups": 1}, 1),
        ({"speculative": "ngram"}, 1),
        ({"max_iterations": 4}, 1),
        ({"deterministic": True}, 1),
    ],
)
def test_there_are_as_many_groups_as_stages_where_that_works(settings: dict[str, Any], groups: int) -> None:
    options = EngineOptions(kv_memory=10**7, num_slots=10, **settings)
    config = resolve_config(MODELS["dense"].model, options, "cpu", "float32", 128, parse_mesh("pipe=4"))
    assert config.decode_groups == groups
    assert config.decode_rows[-1] == (3 if groups == 4 else 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_groups": 3}, "decode_groups 3 with 2 stages: it must be 1 or 2"),
        ({"decode_groups": 2, "speculative": "ngram"}, "decode_groups 2 with max_drafts "),
        ({"decode_groups": 2, "max_iterations": 4}, "decode_groups 2 with max_iterations 4"),
        ({"decode_groups": 2, "deterministic": True}, "decode_groups 2 with shape-invariant numerics"),
    ],
)
def test_groups_that_there_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    options = EngineOptions(kv_memory=10**7, **settings)
    with pytest.raises(ValueError, match=message):
        resolve_config(MODELS["dense"].model, options, "cpu", "float32", 128, parse_mesh("pipe=2"))

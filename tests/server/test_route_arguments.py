"""`--route NAME=MODEL[,KEY=VALUE...]`, and what else declares a route."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxserve.scheduling import SchedulerPolicy
from server.command import SERVE, read_route_arguments
from server.route_arguments import RouteArguments


def routes(*arguments: str) -> list[RouteArguments]:
    parser = argparse.ArgumentParser()
    SERVE.add_arguments(parser)
    return read_route_arguments(parser.parse_args(arguments))


def policy_of(route: RouteArguments) -> SchedulerPolicy:
    return route.read_frozen()[0]


def test_models_are_routes_by_their_own_names_and_the_first_is_the_default() -> None:
    first, second, third = routes(
        "owner/a", "b", "--route", "chat=smollm2-135m,fallback=b", "--dtype", "bfloat16"
    )
    assert (first.name, first.model) == ("owner/a", "owner/a")
    assert (second.name, second.fallback) == ("b", None)
    assert (third.name, third.model, third.fallback) == ("chat", "smollm2-135m", "b")
    assert {route.settings["dtype"] for route in (first, second, third)} == {"bfloat16"}
    (named,) = routes("owner/a", "--name", "chat")
    assert (named.name, named.model) == ("chat", "owner/a")


def test_a_route_s_own_options_come_before_those_of_all() -> None:
    text = (
        "small=m,dtype=float32,quantize=int8,kv=int8,slots=3,max-model-len=99,max_chunk=16,kv_memory=2M,deterministic,"
        "host_kv_memory=1G,max_waiting=5,generation_config=none,speculative=draft:a/b,draft_quantize=w8a8,"
        "mesh=tensor=2+expert=4,prefill_mesh=tensor=2"
    )
    other, small = routes(
        "m", "--route", text, "--num-slots", "8", "--max-waiting", "7", "--speculative", "ngram"
    )
    assert (other.settings["num_slots"], other.settings["speculative"], other.max_waiting) == (8, "ngram", 7)
    assert other.generation_config == "auto"
    assert small.settings == {
        "dtype": "float32",
        "quantize": "int8",
        "kv_format": "int8",
        "num_slots": 3,
        "max_model_len": 99,
        "max_chunk": 16,
        "kv_memory": 2**21,
        "host_kv_memory": 2**30,
        "deterministic": True,
        "speculative": "draft:a/b",
        "draft_quantize": "w8a8",
        "mesh": "tensor=2,expert=4",
        "prefill_mesh": "tensor=2",
    }
    assert (small.max_waiting, small.generation_config) == (5, "none")


def test_a_route_s_policy_is_the_file_s_with_its_own_longest_queue(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('order = "fcfs"\nmax_waiting = 9\n')
    default, cold, short = routes(
        "m",
        "--route",
        f"cold=m,policy={file},prefix_cache=false",
        "--route",
        f"short=m,policy={file},max_waiting=2",
    )
    assert policy_of(default) == SchedulerPolicy()
    assert (default.prefix_cache, cold.prefix_cache, short.prefix_cache) == (True, False, True)
    assert [(policy_of(one).order, policy_of(one).max_waiting) for one in (cold, short)] == [
        ("fcfs", 9),
        ("fcfs", 2),
    ]
    common = routes("a", "b", "--policy", str(file), "--no-prefix-cache", "--max-waiting", "3")
    assert [policy_of(one).max_waiting for one in common] == [3, 3]
    assert not any(one.prefix_cache for one in common)
    file.write_text("order = 'backwards'")
    with pytest.raises(ValueError, match="backwards"):
        policy_of(short)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to serve"),
        (["a", "a"], "two routes are called 'a'"),
        (["a", "--route", "a=b"], "two routes are called 'a'"),
        (["a", "b", "--name", "c"], "--name is for a single MODEL"),
        (["a", "--route", "chat"], "expected NAME=MODEL"),
        (["a", "--route", "=b"], "expected NAME=MODEL"),
        (["a", "--route", "c=b,colour=red"], "'colour' is not one of dtype, quantize"),
        (["a", "--route", "c=b,quantize=int3"], "quantize 'int3' is not one of f32, bf16, int8"),
        (["a", "--route", "c=b,slots=many"], "slots: 'many' is no whole number"),
        (["a", "--route", "c=b,kv=int8,kv_format=int8"], "kv_format is there twice"),
        (["a", "--route", "c=b,kv_memory=big"], "kv_memory: 'big' is no size"),
        (["a", "--route", "c=b,deterministic=maybe"], "'maybe' is not true or false"),
        (["a", "--route", "c=b,generation_config=file"], "'file' is not one of auto, none"),
        (["a", "--route", "c=b,speculative=guess"], "'guess' is not one of ngram, ngram:TOKENS, skip:N"),
        (["a", "--route", "c=b,fallback="], "fallback: a name is missing"),
        (["a", "--route", "c\td=b"], "printable"),
        (["a", "--max-waiting", "-1"], "--max-waiting -1 is negative"),
    ],
)
def test_what_is_malformed_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        routes(*arguments)

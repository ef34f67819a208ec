"""What drafts, by name."""

from __future__ import annotations

import pytest

from jaxserve.speculation import EngineDrafter, NgramDrafter, named_speculation, read_speculative


def test_names() -> None:
    assert named_speculation(None, 7) is None
    lookup, skip = named_speculation("ngram", 7), named_speculation("skip:12", 3)
    assert lookup is not None
    assert skip is not None
    assert (lookup.drafter, lookup.max_drafts, lookup.name) == (NgramDrafter, 7, "ngram")
    assert (skip.drafter, skip.max_drafts, skip.name) == (EngineDrafter, 3, "skip:12")
    assert (lookup.in_engine, skip.in_engine) == (False, True)
    assert read_speculative("skip:12").num_layers == 12
    assert (lookup.shared_tokens, skip.shared_tokens) == (0, 0)
    shared = named_speculation("ngram:50000", 7)
    assert shared is not None
    assert (shared.drafter, shared.shared_tokens, shared.name) == (NgramDrafter, 50000, "ngram:50000")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("draft:smollm2-135m", "draft:smollm2-135m"),
        ("draft:owner/name", "draft:owner/name"),
        ("draft:/models/of/somebody/small.gguf", "draft:small.gguf"),
        ("draft:./small/", "draft:small"),
    ],
)
def test_a_model_that_drafts_is_named_without_its_place(name: str, label: str) -> None:
    speculation = named_speculation(name, 4)
    assert speculation is not None
    assert (speculation.drafter, speculation.name) == (EngineDrafter, label)
    assert read_speculative(name).model == name.removeprefix("draft:")


@pytest.mark.parametrize(
    "name",
    ["", "guess", "skip", "skip:", "skip:0", "skip:-1", "skip:x", "ngram:", "ngram:0", "ngram:x", "draft:"],
)
def test_other_names_are_refused(name: str) -> None:
    known = r"ngram, ngram:TOKENS, skip:N \(N layers, from 1 up\), draft:MODEL"
    with pytest.raises(ValueError, match=f"'{name}' is not one of {known}"):
        read_speculative(name)

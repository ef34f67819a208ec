"""Whatever is sampled under a grammar's masks is a text of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.opened_model import open_model
from jaxserve.plan import Grammar, SamplingParams, pack_token_ids
from jaxserve.structured import GrammarCompiler, GrammarMatcher
from jaxserve.text import Tokenizer

EOS = 2
VOCAB = 600
"""More ids than the tokenizer's 512, as with many a model."""


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Tokenizer:
    return Tokenizer.from_folder(shared_data / "models" / "stories260K" / "hf")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with GrammarCompiler(tokenizer, VOCAB, (EOS,)) as compiler:
        yield compiler


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def token(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer.backend.token_to_id(piece)
    if token_id is None:  # a character that no piece of its own spells
        token_id = tokenizer.backend.token_to_id(f"<0x{ord(piece):02X}>")
    assert token_id is not None
    return token_id


def start(compiler: GrammarCompiler, kind: Any, text: str = "", **params: Any) -> GrammarMatcher:
    return compiler.compile(Grammar(kind, text)).matcher(SamplingParams(**params), (EOS,))


def generate(
    matcher: GrammarMatcher, tokenizer: Tokenizer, seed: int, max_tokens: int = 400, short: bool = True
) -> str | None:
    """A random text under the masks; `short` prefers what ends it. None if it would not end."""
    rng, ids = np.random.default_rng(seed), []
    closing = [EOS, *(token(tokenizer, piece) for piece in '"}]:,0')]
    for number in range(max_tokens):
        if matcher.finished:
            return tokenizer.decode(ids)
        choices = allowed(matcher.mask())
        assert choices.max() < tokenizer.vocab_size
        assert (EOS in choices) == matcher.complete
        ends = [token_id for token_id in closing if token_id in choices]
        token_id = ends[0] if short and ends and number > 20 else int(rng.choice(choices))
        matcher.accept(token_id)
        ids.append(token_id)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_any_json_object(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    text = generate(start(compiler, "json_object"), tokenizer, seed)
    assert text is not None
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "pattern", [r"[a-c]{2,4}-\d+", r"(yes|no)( sir)?", r"/x*/", r"[^\n]{3}é", "", "a\nb"]
)
def test_a_regex_matches_the_whole(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    text = generate(start(compiler, "regex", pattern), tokenizer, seed)
    assert text is not None
    assert re.fullmatch(pattern, text)


def test_every_choice_and_no_other(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = ["red", "redder", 'with "quotes"\\ and\nlines', "grün 😀", "a|b", "/"]
    texts = {
        generate(start(compiler, "choice", json.dumps(choices)), tokenizer, seed, short=False)
        for seed in range(60)
    }
    assert texts == set(choices)


EBNF = {
    'root ::= "a" | "b" root': r"b*a",
    'root ::= "SELECT " col (", " col)*  # columns\n  " FROM t"\ncol ::= "x"\n  | "y"\n  | "z" [0-9]{1,2}': (
        r"SELECT (x|y|z\d{1,2})(, (x|y|z\d{1,2}))* FROM t"
    ),
    'root ::= "\\u00e9\\x41" [\\u0061-c]+ "#"': r"éA[a-c]+#",
    'root ::= one-item twoItems\none-item ::= "[" [^\\]\\n] "]"\ntwoItems ::= ("(" twoItems ")")?': (
        r"\[[^\]\n]\]\(*\)*"
    ),
    'start: "x" WORD\nWORD: /[a-z]+/': r"x[a-z]+",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("grammar", EBNF)
def test_ebnf_in_the_usual_styles(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, seed: int
) -> None:
    matcher = start(compiler, "ebnf", grammar)
    text = generate(matcher, tokenizer, seed, max_tokens=60)
    if text is not None:
        assert re.fullmatch(EBNF[grammar], text)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """The few keywords that the strategy below uses."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(conforms(value, branch) for branch in schema["anyOf"])
    checks: dict[str, Callable[[], bool]] = {
        "object": lambda: (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(conforms(value[name], schema["properties"][name]) for name in value)
        ),
        "array": lambda: (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(conforms(item, schema["items"]) for item in value)
        ),
        "string": lambda: isinstance(value, str) and len(value) <= schema["maxLength"],
        "integer": lambda: type(value) is int and schema["minimum"] <= value <= schema["maximum"],
        "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None,
    }
    return checks[schema["type"]]()


LEAVES = st.one_of(
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        *[st.integers(0, 99)] * 2,
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9)), min_size=1, max_size=3, unique_by=repr),
    ),
)


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    required = list(properties)[:num_required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            _object,
            st.dictionaries(st.text("abé ", min_size=1, max_size=4), inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(
            lambda items, n: {"type": "array", "items": items, "minItems": n, "maxItems": n + 1},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 9))
def test_random_schemas(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    text = generate(start(compiler, "json_schema", json.dumps(schema)), tokenizer, seed, max_tokens=1500)
    assert text is not None
    assert conforms(json.loads(text), schema), text


def test_blanks_between_json_tokens_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = start(compiler, "json_object")
    brace, newline = token(tokenizer, "{"), tokenizer.encode("\n")[-1]
    matcher.accept(brace)
    for _ in range(64):
        matcher.accept(newline)
    assert newline not in allowed(matcher.mask())


def test_the_end_comes_exactly_where_the_text_may_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    a, b = (token(tokenizer, piece) for piece in "ab")
    matcher = start(compiler, "regex", "ab?", stop_token_ids=[7])
    assert EOS not in allowed(matcher.mask())
    assert not matcher.complete
    with pytest.raises(ValueError, match="ends the text before"):
        matcher.copy().accept(7)
    matcher.accept(a)
    assert set(allowed(matcher.mask())) >= {EOS, 7, b}
    assert matcher.complete
    assert not matcher.finished
    beyond = matcher.copy()
    beyond.accept(b)
    assert beyond.finished
    assert list(allowed(beyond.mask())) == [EOS, 7]
    with pytest.raises(ValueError, match="after the end"):
        beyond.copy().accept(a)
    beyond.rollback(1)
    assert np.array_equal(beyond.mask(), matcher.mask())
    matcher.accept(EOS)
    assert matcher.finished
    matcher.rollback(2)
    assert not matcher.complete


def test_a_request_that_ignores_the_end_goes_on_until_nothing_can_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = start(compiler, "regex", "ab?", ignore_eos=True)
    matcher.accept(token(tokenizer, "a"))
    assert EOS not in allowed(matcher.mask())
    assert not matcher.finished
    matcher.accept(token(tokenizer, "b"))
    assert matcher.finished
    assert not matcher.mask().any()


def test_allowed_and_bad_tokens_narrow_the_mask(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b, c = (token(tokenizer, piece) for piece in "abc")
    matcher = start(compiler, "regex", "[a-z]+", allowed_token_ids=[a, b, EOS], bad_token_ids=[b])
    assert list(allowed(matcher.mask())) == [a]
    matcher.accept(a)
    assert list(allowed(matcher.mask())) == [EOS, a]
    with pytest.raises(ValueError, match="no token that may be sampled"):
        start(compiler, "regex", "[a-z]+", allowed_token_ids=[EOS]).mask()
    # Where only the end is left and it is not allowed, there is nothing to wait for.
    matcher = start(compiler, "regex", "c[a-z]*", allowed_token_ids=[c], bad_token_ids=[EOS])
    matcher.accept(c)
    assert list(allowed(matcher.mask())) == [c]


def test_a_token_that_does_not_fit_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        start(compiler, "json_object").accept(token(tokenizer, "a"))


def test_masks_are_exact(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Every token whose text goes on with the grammar, not just the one way the tokenizer would spell it."""
    matcher = start(compiler, "choice", '["once upon"]')
    text = b"once upon"
    pieces = [b"" if i in {*tokenizer.special_ids, EOS} else tokenizer.token_bytes[i] for i in range(512)]
    expected = [i for i, piece in enumerate(pieces) if piece and text.startswith(piece)]
    assert list(allowed(matcher.mask())) == expected
    assert len(expected) > 2


@pytest.mark.real
def test_a_byte_level_vocabulary_of_a_gguf_file() -> None:
    opened = open_model("smollm2-135m")
    tokenizer, model = opened.tokenizer, opened.checkpoint.config
    with GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids) as compiler:
        text = json.dumps({"name": "Ålice 😀", "tags": [1.5, None, True]}, indent=2, ensure_ascii=False)
        matcher = start(compiler, "json_object")
        for token_id in tokenizer.encode(text):
            assert not matcher.complete
            assert token_id in allowed(matcher.mask())
            matcher.accept(token_id)
        assert matcher.finished
        assert list(allowed(matcher.mask())) == [EOS]


def test_words_of_bits() -> None:
    assert pack_token_ids([0, 33], 40).tolist() == [1, 2]
    assert SamplingParams().permitted_tokens(40) is None
    permitted = SamplingParams(allowed_token_ids=[1, 2], bad_token_ids=[2]).permitted_tokens(40)
    assert permitted is not None
    assert allowed(permitted).tolist() == [1]

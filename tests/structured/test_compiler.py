"""What is refused, how soon, and that nothing else suffers from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.plan import Grammar
from jaxserve.structured import GrammarCompiler
from jaxserve.text import Tokenizer


@pytest.fixture(scope="module")
def compiler(shared_data: Path) -> Iterator[GrammarCompiler]:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "stories260K" / "hf")
    with GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,)) as compiler:
        yield compiler


FAULTS = {
    ("json_schema", "{"): "json_schema: json_schema is not JSON: Expecting property name",
    ("json_schema", "[]"): "json_schema is a JSON list; it must be an object or a boolean",
    ("json_schema", '{"type": "nope"}'): "Invalid type: nope",
    ("json_schema", '{"type": "array", "uniqueItems": true}'): 'Unimplemented keys: \\["uniqueItems"\\]',
    (
        "json_schema",
        '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}',
    ): "Unimplemented",
    ("json_schema", "false"): "(?i)unsatisfiable|empty",
    ("json_schema", '{"$ref": "http://example.com/x.json"}'): "does not fetch",
    ("json_schema", '{"$ref": "#"}'): "no text of it can be spelled",
    ("json_schema", '{"type": "string", "pattern": "["}'): "unclosed character class",
    ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000): "nested too deeply|recursion limit",
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'): "branches exclude one another",
    ("regex", "a["): "unclosed character class",
    ("regex", "(?=a)b"): "look-around",
    ("choice", "[]"): "a JSON list of one or more strings",
    ("choice", '["a", 1]'): "choice 1 is not a string",
    ("choice", '["\\ud800"]'): "is not a string of Unicode",
    ("ebnf", 'rot ::= "a"'): "No 'root' rule",
    ("ebnf", "root ::= foo"): "'foo' not found",
    ("ebnf", 'root ::= "a'): "Unexpected end",
    ("ebnf", 'root ::= "\\ud800"'): "no Unicode character",
    ("ebnf", "root ::= " + "(" * 3000): "nested too deeply",
    ("ebnf", "nonsense"): "Expected token",
    ("regex", "a" * 300_000): "regex of 300000 characters; the limit is 262144",
}


@pytest.mark.parametrize("kind_text", FAULTS, ids=lambda kind_text: f"{kind_text[0]}:{kind_text[1][:40]}")
def test_a_fault_is_named(compiler: GrammarCompiler, kind_text: tuple[Any, str]) -> None:
    with pytest.raises(ValueError, match=FAULTS[kind_text]) as caught:
        compiler.compile(Grammar(*kind_text))
    assert len(str(caught.value)) < 400


HOSTILE = {
    "exponential": {"type": "string", "allOf": [{"pattern": f"(.*a.{{10}}){i}"} for i in range(30)]},
    "large": {"type": "integer", "multipleOf": 1_000_003},
    "wide": {"type": "object", "properties": {f"k{i}": {} for i in range(8000)}},
}


@pytest.mark.alone
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_answered_soon_and_others_go_on(compiler: GrammarCompiler, name: str) -> None:
    grammar = Grammar("json_schema", json.dumps(HOSTILE[name]))
    compiler.compile(Grammar("regex", "warm"))  # so that a process is there
    faults: list[str] = []

    def compile_hostile() -> None:
        with pytest.raises(ValueError, match=r"too complex|it takes over") as caught:
            compiler.compile(grammar)
        faults.append(str(caught.value))

    started = time.process_time()
    thread = threading.Thread(target=compile_hostile)
    thread.start()
    compiler.compile(Grammar("regex", f"[a-z]{{3}}{name}"))
    thread.join(timeout=60.0)
    assert faults
    assert time.process_time() - started < 5.0  # of this process: the other one's second is its own
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"too complex|it takes over"):
        compiler.compile(grammar)
    assert time.monotonic() - started < 1.0  # known by now


def test_bounded_repetitions_compile(compiler: GrammarCompiler) -> None:
    for pattern in ("a{1,100000}", "(a|b)*a(a|b){20}", "((a{1,1000}){1,1000}){1,1000}"):
        compiler.compile(Grammar("regex", pattern))


def test_a_grammar_is_compiled_once_and_the_oldest_forgotten(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "stories260K" / "hf")
    with GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,), cache_size=2) as compiler:
        first, second, third = (Grammar("choice", f'["{text}"]') for text in "abc")
        kept = compiler.compile(first)
        compiler.compile(second)
        assert compiler.compile(first) is kept
        forgotten = compiler.compile(second)
        compiler.compile(first)
        compiler.compile(third)
        assert compiler.compile(first) is kept
        assert compiler.compile(second) is not forgotten


def test_no_process_is_started_for_what_needs_none(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "stories260K" / "hf")
    monkeypatch.setattr("subprocess.Popen", None)
    with GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,)) as compiler:
        compiler.compile(Grammar("json_object"))
        compiler.compile(Grammar("choice", '["a", "b"]'))


def test_a_missing_package_is_named(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models" / "stories260K" / "hf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="grammars need the llguidance package"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))

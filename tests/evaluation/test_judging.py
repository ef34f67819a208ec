"""What an answer is worth."""

from __future__ import annotations

import pytest

from jaxserve.evaluation import Case
from jaxserve.evaluation.judging import common_share, is_exact, meets_schema, refuses
from jaxserve.evaluation.prompt_sets import Instruction
from jaxserve.evaluation.tasks import Answer, Answered, check_cases, judge_slices, not_judged

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("So she makes $18.", "9 * 2 = 18\n#### 18"),
        ("First 3, then 1,234.0 dollars", "#### 1,234"),
        ("-5", "-5"),
        ("of 3-5, the latter", "5"),
        ("  The\nDog. ", '"the dog"'),
    ],
)
def test_what_was_expected_is_found(answer: str, expected: str) -> None:
    assert is_exact(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("18, no, 19", "#### 18"), ("eighteen", "18"), ("the dog barks", "the dog"), ("", "dog"), ("", "3")],
)
def test_what_was_not_expected_is_not(answer: str, expected: str) -> None:
    assert not is_exact(answer, expected)


@pytest.mark.parametrize("answer", ["I can't help.", " I\u2019m sorry, but no", "As an AI, I"])
def test_refusals(answer: str) -> None:
    assert refuses(answer)


@pytest.mark.parametrize("answer", ["Sure!", "You say: I can't.", ""])
def test_no_refusals(answer: str) -> None:
    assert not refuses(answer)


def test_the_share_of_tokens_before_the_first_difference() -> None:
    assert common_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert common_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert common_share([1], [1]) == common_share([], []) == 1.0
    assert common_share([1], [2]) == 0.0


def test_schemas() -> None:
    pytest.importorskip("jsonschema", reason="needs the evaluate extra")
    assert meets_schema('{"n": 3}', SCHEMA)
    assert meets_schema('```json\n{"n": 3}\n```', SCHEMA)
    assert not meets_schema('{"n": 3.5}', SCHEMA)
    assert not meets_schema("n is 3", SCHEMA)
    assert not meets_schema("1", False)
    with pytest.raises(ValueError, match=r"^f:7: no JSON schema: 'objekt'"):
        check_cases([asked(schema={"type": "objekt"}, source="f:7")])


def test_without_the_checker_a_schema_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"jaxserve\[evaluate\]"):
        check_cases([asked(schema=SCHEMA)])


def test_wrong_arguments_of_an_instruction_are_found_before_any_answer() -> None:
    with pytest.raises(ValueError, match=r"^f:3: punctuation:no_comma with"):
        check_cases([asked(source="f:3", instructions=(Instruction("punctuation:no_comma", {"x": 1}),))])


def asked(**fields: object) -> Case:
    return Case(**({"source": "f:1", "slice": "s", "messages": []} | fields))  # type: ignore[arg-type]


def test_slices_count_what_they_can_judge() -> None:
    comma = (Instruction("punctuation:no_comma", {}), Instruction("language:response_language", {}))
    answered = [
        Answered(asked(answer="4"), Answer("It is 5.", [1, 2]), Answer("It is 4.", [1, 3])),
        Answered(asked(answer="4"), Answer("4", [7]), Answer("4", [7])),
        Answered(asked(slice="t", instructions=comma), Answer("a, b", [1]), Answer("I cannot", [2])),
    ]
    first, second = judge_slices(answered)
    assert (first.name, first.size, second.name, second.size) == ("s", 2, "t", 1)
    assert (first.measures["exact"].model, first.measures["exact"].reference) == (0.5, 1.0)
    assert first.measures["exact-loss"].value == 0.5
    assert first.measures["agreement"].value == 0.75
    assert first.measures["identical"].value == 0.5
    assert first.measures["refusals-change"].value == 0.0
    assert "instructions" not in first.measures
    assert "exact" not in second.measures
    assert second.measures["instructions"].value == 0.0
    assert second.measures["instructions-loss"].value == 1.0
    assert second.measures["refusals-change"].value == 1.0
    assert not_judged([one.case for one in answered]) == {"language:response_language": 1}

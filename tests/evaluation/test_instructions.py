"""Each instruction that is judged, followed and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.evaluation import read_prompt_set
from jaxserve.evaluation.instructions import CHECKS, follows
from jaxserve.evaluation.prompt_sets import Instruction

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I SAY no", "NASA and ESA"],
        ["One Two three", "only NASA"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["only NASA"],
        ["NASA and ESA"],
    ),
    ("change_case:english_capital", {}, ["ALL 3 ARE BIG."], ["Not all ARE"]),
    ("change_case:english_lowercase", {}, ["all 3 are small."], ["Not this"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a Poem."},
        ["write a poem.\nRoses"],
        ["Sure! Write a poem. Roses"],
    ),
    ("combination:two_responses", {}, ["one\n******\ntwo"], ["one", "one ****** one", "a******b******c"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b]"], ["[a] and b"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "p. s. x"],
        ["Bye."],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more"], ["P.S. more"]),
    ("detectable_format:constrained_response", {}, ["Well, my answer is maybe."], ["Yes."]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["{a: 1}", "Here: {}"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 a Section 2 b"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n - b"],
        ["* a", "a\n**b**"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a* and b", "** ** and *b*"],
    ),
    ("detectable_format:title", {}, ["<<On dogs>>\ntext"], ["<<>>\ntext", "On dogs"]),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ["Dogs and CATS"], ["only a dog"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["rocket science"], ["a Rock fell"]),
    ("keywords:frequency", {"keyword": "la", "frequency": 2, "relation": "at least"}, ["La la"], ["la"]),
    ("keywords:frequency", {"keyword": "la", "frequency": 2, "relation": "less than"}, ["la"], ["la la"]),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        ["E-le-ven"],
        ["ten"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ['One.\n\n"Then, two.'],
        ["One.\n\nThenceforth.", "Then.", "a\n\nthen\n\nb"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb"],
        ["a\n\nb"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "One? And two"],
        ["Only one...", "One"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["two words"], ["a b c"]),
    ("punctuation:no_comma", {}, ["none here"], ["here, one"]),
    ("startend:end_checker", {"end_phrase": "Peace!"}, ["Bye. peace! "], ["Peace! Bye."]),
    ("startend:quotation", {}, ['"quoted"'], ["plain", '"half', '"']),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(
    name: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    instruction = Instruction(name, arguments)
    for answer in good:
        assert follows(instruction, answer) is True, answer
    for answer in [*bad, "", " \n"]:
        assert follows(instruction, answer) is False, answer


def test_every_instruction_is_tried() -> None:
    assert {name for name, *_ in CASES} == {*CHECKS}


def test_an_unknown_instruction_is_not_judged() -> None:
    assert follows(Instruction("language:response_language", {"language": "hi"}), "Namaste") is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("keywords:frequency", {"keyword": "a"}),
        ("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"}),
        ("punctuation:no_comma", {"num": 1}),
        ("keywords:existence", {"keywords": 5}),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name} with"):
        follows(Instruction(name, arguments), "An answer.")


def test_ifeval_is_judged_but_for_languages(shared_data: Path) -> None:
    path = shared_data / "prompts" / "ifeval" / "input_data.jsonl"
    cases = read_prompt_set(path)
    assert len(cases) == len(path.read_text().splitlines())
    instructions = [instruction for case in cases for instruction in case.instructions]
    verdicts = {one.name: follows(one, "Some answer of mine.") for one in instructions}
    assert [name for name, verdict in verdicts.items() if verdict is None] == ["language:response_language"]
    assert len(instructions) == sum(
        len(json.loads(line)["instruction_id_list"]) for line in path.read_text().splitlines()
    )

"""Prompt sets: what a line may be, and what is said of one that may not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.evaluation import Case, read_prompt_set
from jaxserve.evaluation.prompt_sets import Instruction


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_are_found_under_their_names(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *user("hi")]
    lines: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"question": "b", "answer": "x #### 4"},
        {"turns": ["c", "later"], "category": "writing"},
        {"messages": chat, "slice": "chat", "answer": 4},
    ]
    cases = read_prompt_set(written(tmp_path, *lines, ""))
    assert [case.messages for case in cases] == [user("a"), user("b"), user("c"), chat]
    assert [case.slice for case in cases] == ["mine", "mine", "mine/writing", "mine/chat"]
    assert [case.answer for case in cases] == [None, "x #### 4", None, "4"]
    assert cases[1].source == f"{tmp_path / 'mine.jsonl'}:2"


def test_instructions_lose_arguments_that_are_not_given(tmp_path: Path) -> None:
    line = {"prompt": "a", "instruction_id_list": ["x:y", "z"], "kwargs": [{"n": 3, "other": None}, {}]}
    (case,) = read_prompt_set(written(tmp_path, line))
    assert case.instructions == (Instruction("x:y", {"n": 3}), Instruction("z", {}))


def test_the_first_lines_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "broken")
    assert len(read_prompt_set(path, limit=2)) == 2


def test_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert [case.slice for case in read_prompt_set(path)] == ["mine"]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_prompt_set(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ([1], "no JSON object"),
        ({"text": "a"}, "no prompt"),
        ({"prompt": " "}, "no prompt"),
        ({"prompt": 5, "answer": []}, "answer is"),
        ({"messages": []}, "messages is"),
        ({"messages": [{"role": "user"}]}, "messages is"),
        ({"prompt": "a", "schema": "object"}, "schema is 'object'"),
        ({"prompt": "a", "instruction_id_list": ["x"], "kwargs": []}, "instruction_id_list"),
        ({"prompt": "a", "instruction_id_list": "x"}, "instruction_id_list"),
        ({"prompt": "a", "category": ["x"]}, "category is"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = written(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompt_set(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_an_empty_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompt_set(written(tmp_path, ""))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_prompt_set(path)


@pytest.mark.parametrize(
    ("name", "slice_name", "number"),
    [
        ("gsm8k/test.jsonl", "gsm8k", 400),
        ("humaneval/HumanEval.jsonl.gz", "HumanEval", 164),
        ("mt_bench/question.jsonl", "mt_bench/writing", 80),
        ("ifeval/input_data.jsonl", "ifeval", 541),
    ],
)
def test_public_sets_are_read(shared_data: Path, name: str, slice_name: str, number: int) -> None:
    cases: list[Case] = read_prompt_set(shared_data / "prompts" / name)
    assert (cases[0].slice, len(cases)) == (slice_name, number)

"""Instructions whose following can be checked, under the names and arguments of IFEval (arXiv 2311.07911).

Where a sentence ends is found by its punctuation, not by a trained splitter, and case is checked without
looking at the language; otherwise these are IFEval's strict rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jaxserve.evaluation.prompt_sets import Instruction

Check = Callable[..., bool]
"""Of the answer, and of the instruction's arguments by name."""

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL | re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?]*[A-Za-z0-9][^.!?]*(?:[.!?]+|$)")
_CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def follows(instruction: Instruction, answer: str) -> bool | None:
    """Whether an answer follows an instruction; None for one that is not judged here.

    Raises ValueError for arguments that the instruction does not take.
    """
    check = CHECKS.get(instruction.name)
    if check is None:
        return None
    try:
        return bool(answer.strip()) and check(answer, **instruction.arguments)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{instruction.name} with {dict(instruction.arguments)}: {error}") from error


def parse_json(text: str) -> Any:
    """A text as JSON, a Markdown fence around it aside. Raises ValueError if it is none."""
    fenced = _FENCE.fullmatch(text)
    return json.loads(fenced[1] if fenced else text)


def _relates(count: int, relation: str, bound: int) -> bool:
    if relation not in {"less than", "at least"}:
        raise TypeError(f"relation {relation!r} is not one of less than, at least")
    return count < bound if relation == "less than" else count >= bound


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _keywords_exist(answer: str, keywords: list[str]) -> bool:
    return all(_count(re.escape(word), answer) for word in keywords)


def _keyword_frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    return _relates(_count(re.escape(keyword), answer), relation, frequency)


def _words_absent(answer: str, forbidden_words: list[str]) -> bool:
    return not any(_count(rf"\b{re.escape(word)}\b", answer) for word in forbidden_words)


def _letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _relates(answer.lower().count(letter.lower()), let_relation, let_frequency)


def _num_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    return _relates(len(_SENTENCE.findall(answer)), relation, num_sentences)


def _num_words(answer: str, num_words: int, relation: str) -> bool:
    return _relates(len(re.findall(r"\w+", answer)), relation, num_words)


def _num_paragraphs(answer: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", answer)
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == num_paragraphs


def _first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in answer.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = re.match(r"['\"]*([^\s.,?!'\"]*)", paragraphs[nth_paragraph - 1])
    return word is not None and word[1].lower() == first_word.lower()


def _num_placeholders(answer: str, num_placeholders: int) -> bool:
    return _count(r"\[.*?\]", answer) >= num_placeholders


def _postscript(answer: str, postscript_marker: str) -> bool:
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    return bool(re.search(r"\s*" + r"\.?\s?".join(map(re.escape, letters)), answer, re.IGNORECASE))


def _num_bullets(answer: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*\n]|-)", answer, re.MULTILINE)) == num_bullets


def _num_highlights(answer: str, num_highlights: int) -> bool:
    marked = re.findall(r"\*\*([^\n*]*)\*\*|\*([^\n*]+)\*", answer)
    return sum(bool("".join(pair).strip()) for pair in marked) >= num_highlights


def _num_sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", answer)) - 1 >= num_sections


def _is_json(answer: str) -> bool:
    try:
        parse_json(answer)
    except ValueError:
        return False
    return True


def _has_title(answer: str) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", answer))


def _repeats_prompt(answer: str, prompt_to_repeat: str) -> bool:
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _two_responses(answer: str) -> bool:
    parts = [part.strip() for part in answer.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


def _ends_with(answer: str, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _is_quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"[^\W\d_][\w'-]*", answer)
    return _relates(sum(word.isupper() for word in words), capital_relation, capital_frequency)


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "combination:repeat_prompt": _repeats_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _num_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": lambda answer: any(c in answer.lower() for c in _CHOICES),
    "detectable_format:json_format": _is_json,
    "detectable_format:multiple_sections": _num_sections,
    "detectable_format:number_bullet_lists": _num_bullets,
    "detectable_format:number_highlighted_sections": _num_highlights,
    "detectable_format:title": _has_title,
    "keywords:existence": _keywords_exist,
    "keywords:forbidden_words": _words_absent,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_sentences": _num_sentences,
    "length_constraints:number_words": _num_words,
    "punctuation:no_comma": lambda answer: "," not in answer,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
}
"""The instructions that are judged, by name."""

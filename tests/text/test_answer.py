from __future__ import annotations

from jaxserve.plan import SamplingParams
from jaxserve.text import AnswerText, Tokenizer


def answer(tokenizer: Tokenizer, text: str, **params: object) -> tuple[AnswerText, list[str]]:
    made = AnswerText(tokenizer, [], SamplingParams(max_tokens=100, **params))  # pyright: ignore[reportArgumentType]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return made, [made.push(token_id) for token_id in ids]


def test_text_without_stops_comes_as_it_is_made(byte_level: Tokenizer) -> None:
    made, pieces = answer(byte_level, "hello w😀")
    assert pieces == ["hell", "o", " w", "", "😀"]
    assert made.text == "hello w😀"
    assert made.finish() == ""
    assert made.stopped is None


def test_a_stop_string_over_several_tokens_ends_the_answer(byte_level: Tokenizer) -> None:
    made, pieces = answer(byte_level, "hello world", stop="o wo")
    assert pieces == ["hell", "", "", "", "", "", ""]
    assert (made.text, made.stopped) == ("hell", "o wo")
    assert made.finish() == ""


def test_the_stop_string_itself_can_be_shown(byte_level: Tokenizer) -> None:
    made, _ = answer(byte_level, "hello world", stop=["never", "o w"], include_stop_str_in_output=True)
    assert (made.text, made.stopped) == ("hello w", "o w")


def test_finish_releases_a_partial_stop(byte_level: Tokenizer) -> None:
    made, pieces = answer(byte_level, "hello", stop="lots")
    assert pieces == ["hel", ""]
    assert made.finish() == "lo"
    assert (made.text, made.stopped) == ("hello", None)


def test_finish_releases_a_partial_stop_and_an_incomplete_character(byte_level: Tokenizer) -> None:
    made, pieces = answer(byte_level, "hello", stop="lot\ufffd")
    assert pieces == ["hel", ""]
    made.push(byte_level.encode("😀", add_special_tokens=False)[0])
    assert made.finish() == "lo\ufffd"
    assert made.text == "hello\ufffd"


def test_what_only_the_end_makes_certain_can_still_be_a_stop(byte_level: Tokenizer) -> None:
    made, _ = answer(byte_level, "hell", stop="\ufffd")
    made.push(byte_level.encode("😀", add_special_tokens=False)[0])
    assert made.finish() == ""
    assert (made.text, made.stopped) == ("hell", "\ufffd")


def test_the_first_min_tokens_are_not_searched(byte_level: Tokenizer) -> None:
    made, pieces = answer(byte_level, "hello hello", stop="hell", min_tokens=1)
    assert pieces == ["hell", "o", " ", "", ""]
    assert (made.text, made.stopped) == ("hello ", "hell")


def test_special_tokens_are_shown_on_request(byte_level: Tokenizer) -> None:
    assert answer(byte_level, "he<|start|>he")[0].text == "hehe"
    assert answer(byte_level, "he<|start|>he", skip_special_tokens=False)[0].text == "he<|start|>he"


def test_the_prompt_decides_about_a_leading_space(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the")[-1]
    for prompt_ids, text in (([1], "the"), ([1, the], " the")):
        made = AnswerText(sentencepiece, prompt_ids, SamplingParams())
        assert made.push(the) == text

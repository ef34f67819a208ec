from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import IncrementalDetokenizer, Tokenizer

PROPERTY = settings(max_examples=400, derandomize=True, deadline=None, database=None)
IDS = st.lists(st.integers(0, 280), max_size=16)
"""All ids of the small vocabularies, and some that they do not know."""


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    return token_id


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, in either vocabulary."""
    by_bytes = {tokenizer.token_bytes[i]: i for i in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in data]


@PROPERTY
@given(ids=IDS, prompt_ids=IDS, skip=st.booleans())
def test_pieces_make_the_whole_and_wait_for_no_more_than_one_character(
    tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip)
    said = ""
    for count, token_id in enumerate(ids, start=1):
        said += detokenizer.push(token_id)
        so_far = tokenizer.decode(ids[:count], skip, prompt_ids=prompt_ids)
        # What waits are bytes that may yet become one character; alone they are invalid, each of them if
        # they begin a surrogate.
        assert so_far in {said + "\ufffd" * waiting for waiting in range(4)}
    said += detokenizer.finish()
    assert said == tokenizer.decode(ids, skip, prompt_ids=prompt_ids)


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_decode_agrees_with_the_library_wherever_that_is_lossless(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    # The library takes the é of a user-defined token for a byte of the alphabet.
    name_id = tokenizer.backend.token_to_id("[NAME é]")
    known = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token_id: token_id != name_id)
    ids = data.draw(st.lists(known, max_size=16))
    theirs = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in theirs or tokenizer.strip_start == 0:
        assert tokenizer.decode(ids, skip) == theirs


@PROPERTY
@given(text=st.text(max_size=20).filter(lambda text: "▁" not in text and "\n\n" not in text))
def test_any_text_survives_encoding_and_streaming(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == text


@PROPERTY
@given(data=st.binary(max_size=12))
def test_byte_tokens_spell_what_the_bytes_spell(tokenizer: Tokenizer, data: bytes) -> None:
    ids = byte_ids(tokenizer, b"." + data)
    assert "".join(stream(tokenizer, ids)) == "." + data.decode("utf-8", "replace")


def test_a_split_emoji_comes_whole(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a😀b".encode())
    assert stream(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_broken_character_is_replaced_once_that_is_certain(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, byte_ids(tokenizer, b"\xf0\x9fa")) == ["", "", "\ufffda", ""]
    assert stream(tokenizer, byte_ids(tokenizer, b"a\xff")) == ["a", "\ufffd", ""]
    assert stream(tokenizer, byte_ids(tokenizer, b"a\xe2\x82")) == ["a", "", "", "\ufffd"]


def test_a_genuine_replacement_character_is_said_at_once(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, byte_ids(tokenizer, "\ufffd!".encode())) == ["", "", "\ufffd", "!", ""]


def test_an_invalid_byte_leaves_the_characters_before_it_alone(sentencepiece: Tokenizer) -> None:
    assert stream(sentencepiece, byte_ids(sentencepiece, b"\xc3\xa9\xffA")) == ["", "é", "\ufffd", "A", ""]


def test_a_skipped_special_token_does_not_break_a_character(tokenizer: Tokenizer) -> None:
    first, second = byte_ids(tokenizer, "é".encode())
    special = min(tokenizer.special_ids)
    assert stream(tokenizer, [first, special, second]) == ["", "", "é", ""]
    shown = stream(tokenizer, [first, special, second], skip_special_tokens=False)
    assert shown == ["", "\ufffd" + tokenizer.token_text(special), "\ufffd", ""]


def test_a_leading_space_belongs_to_an_answer_but_not_to_a_text(sentencepiece: Tokenizer) -> None:
    the = id_of(sentencepiece, "▁the")
    bos = id_of(sentencepiece, "<s>")
    assert stream(sentencepiece, [the, the]) == ["the", " the", ""]
    assert stream(sentencepiece, [the, the], prompt_ids=[bos]) == ["the", " the", ""]
    assert stream(sentencepiece, [the, the], prompt_ids=[bos, the]) == [" the", " the", ""]
    assert stream(sentencepiece, [the], prompt_ids=[bos], skip_special_tokens=False) == [" the", ""]
    two_spaces = id_of(sentencepiece, "▁▁")
    assert stream(sentencepiece, [two_spaces, the]) == [" ", " the", ""]


def test_unknown_ids_say_nothing_and_negative_ones_are_refused(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [tokenizer.vocab_size + 7]) == ["", ""]
    with pytest.raises(ValueError, match="-1 is negative"):
        IncrementalDetokenizer(tokenizer).push(-1)


def test_a_long_answer_costs_linear_time(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"\x80") * 300_000  # never a whole character: a window would never close
    assert len("".join(stream(tokenizer, ids))) == 300_000


@pytest.mark.parametrize("model", ["qwen3", "smollm2"])
def test_real_vocabularies_stream_real_text(shared_data: Path, model: str) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers" / model)
    texts = shared_data / "tokenizers/llamacpp_vectors/ggml-vocab-qwen2.gguf.inp"
    text = texts.read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.backend.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)

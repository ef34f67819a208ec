from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text import Tokenizer
from jaxserve.weights.gguf_file import read_gguf

PRE_RULES_TEXT = "I'LL'll pay  12345 ½Euros\n\n  toDay!!\n"


def vectors(folder: Path, model: str) -> Iterator[tuple[str, list[int]]]:
    """Texts, and the ids that llama.cpp gives them without special tokens."""
    base = folder / f"tokenizers/llamacpp_vectors/ggml-vocab-{model}.gguf"
    separator = "\n__ggml_vocab_test__\n"
    texts = Path(f"{base}.inp").read_bytes().decode().removesuffix(separator).split(separator)
    lines = Path(f"{base}.out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        yield text, [int(token_id) for token_id in line.split()]


@pytest.mark.parametrize("model", ["gpt-2", "phi-3", "qwen2"])
def test_real_vocabularies_cut_text_as_llama_cpp_does(shared_data: Path, model: str) -> None:
    path = shared_data / f"tokenizers/llamacpp_vectors/ggml-vocab-{model}.gguf"
    metadata, _ = read_gguf(path)
    tokenizer = Tokenizer.from_gguf(metadata)
    for text, ids in vectors(shared_data, model):
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.alone
@pytest.mark.real
def test_smollm2_from_its_file(shared_data: Path, smollm2_gguf: Path) -> None:
    metadata, _ = read_gguf(smollm2_gguf)
    start = time.perf_counter()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert time.perf_counter() - start < 0.5  # 0.13 s on an idle core
    folder = Tokenizer.from_folder(shared_data / "tokenizers/smollm2")
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (folder.eos_token_ids, folder.bos_token_id)
    for text, _ in vectors(shared_data, "gpt-2"):
        if "½" not in text:  # the folder's pre-tokenizer does not isolate numbers beyond 0 to 9
            assert tokenizer.encode(text) == folder.encode(text)
    for prompt in mt_bench(shared_data).values():
        messages = [{"role": "user", "content": prompt}]
        assert tokenizer.apply_chat_template(messages) == folder.apply_chat_template(messages)


@pytest.mark.parametrize("source", ["folder", pytest.param("gguf", marks=pytest.mark.real)])
def test_smollm2_chat_prompts_are_the_golden_ones(
    shared_data: Path, source: str, request: pytest.FixtureRequest
) -> None:
    if source == "folder":
        tokenizer = Tokenizer.from_folder(shared_data / "tokenizers/smollm2")
    else:
        metadata, _ = read_gguf(request.getfixturevalue("smollm2_gguf"))
        tokenizer = Tokenizer.from_gguf(metadata)
    questions = mt_bench(shared_data)
    golden = json.loads((shared_data / "golden/smollm2.json").read_text(encoding="utf-8"))
    for case in golden["cases"]:
        question = questions[int(case["label"].removeprefix("mt_bench "))]
        assert tokenizer.apply_chat_template([{"role": "user", "content": question}]) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], prompt_ids=case["prompt_ids"]) == case["text"]


def mt_bench(folder: Path) -> dict[int, str]:
    lines = (folder / "prompts/mt_bench/question.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["question_id"]: entry["turns"][0] for entry in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "I|'|LL|'ll| pay| | 12345| ½|Euros|\n\n | toDay|!!|\n"),
        ("smollm", "I|'|LL|'ll| pay|  |1|2|3|4|5| |½|Euros|\n\n | toDay|!!|\n"),
        ("llama-bpe", "I|'LL|'ll| pay| | |123|45| |½|Euros|\n\n| | toDay|!!\n"),
        ("qwen2", "I|'LL|'ll| pay| | |1|2|3|4|5| |½|Euros|\n\n| | toDay|!!\n"),
        ("tekken", "I|'LL|'ll| pay| | |1|2|3|4|5| |½|Euros|\n\n| | to|Day|!!\n"),
        ("gpt-4o", "I'LL|'ll| pay| | |123|45| |½|Euros|\n\n| | to|Day|!!\n"),
        ("default", "I|'|LL|'|ll| pay| | |123|45| |½|Euros|\n\n | toDay|!!|\n"),
    ],
)
def test_words_are_cut_by_the_rule_that_the_file_names(
    byte_level_metadata: dict[str, Any], pre: str, words: str
) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": pre})
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(PRE_RULES_TEXT)
    assert "|".join(PRE_RULES_TEXT[start:end] for _, (start, end) in cut) == words


def test_whole_words_come_before_merges_where_the_family_says_so(byte_level_metadata: dict[str, Any]) -> None:
    metadata = dict(byte_level_metadata)
    metadata["tokenizer.ggml.tokens"] = ["world", *metadata["tokenizer.ggml.tokens"][1:]]
    metadata["tokenizer.ggml.add_bos_token"] = False
    for pre, whole in (("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre})
        assert (tokenizer.encode("world") == [0]) is whole


def test_qwen_text_is_composed_first(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the thé <\U0001f600", add_special_tokens=False)
    texts = ["▁the", "▁", "th", "é", "▁", "<", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert [sentencepiece.backend.id_to_token(token_id) for token_id in ids] == texts
    assert sentencepiece.decode(ids) == "the thé <\U0001f600"


@pytest.mark.parametrize("prefix", [True, False])
def test_the_space_prefix_is_the_files_choice(sentencepiece_metadata: dict[str, Any], prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": prefix})
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.backend.id_to_token(ids[0]) == ("▁the" if prefix else "the")
    assert tokenizer.decode(ids) == "the"
    opening = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(opening) == " the"


def test_user_defined_tokens_are_never_cut(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("[NAME]\n\n", add_special_tokens=False)
    assert [sentencepiece.token_text(token_id) for token_id in ids] == ["[NAME]", "\n\n"]
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "[NAME]\n\n"


def test_the_text_of_added_tokens_is_not_in_the_byte_level_alphabet(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("he[NAME é]")
    assert [byte_level.token_text(token_id) for token_id in ids] == ["he", "[NAME é]"]


def test_control_and_unknown_tokens_are_no_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("<unk><s>the", add_special_tokens=False)
    assert ids[:2] == [0, 1]
    assert sentencepiece.decode(ids) == "the"
    assert sentencepiece.decode(ids, skip_special_tokens=False) == "<unk><s> the"


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({"pre": "gpt-2"}, "h", "i"),
        ({"pre": "gpt-2", "add_bos_token": True}, "<|start|>", "i"),
        ({"pre": "llama-bpe"}, "<|start|>", "i"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "h", "i"),
        ({"pre": "gpt-2", "add_eos_token": True, "eos_token_id": 265}, "h", "<|im_end|>"),
    ],
)
def test_marks_around_a_prompt(
    byte_level_metadata: dict[str, Any], fields: dict[str, Any], first: str, last: str
) -> None:
    stated = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | stated)
    ids = tokenizer.encode("hi")
    assert (tokenizer.token_text(ids[0]), tokenizer.token_text(ids[-1])) == (first, last)
    assert tokenizer.decode(tokenizer.encode("hi", add_special_tokens=False), False) == "hi"


def test_sentencepiece_prompts_open_with_bos_and_chats_have_only_the_templates(
    sentencepiece_metadata: dict[str, Any],
) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.chat_template": template})
    the = tokenizer.backend.token_to_id("▁the")
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.render_chat([{"role": "user", "content": "the"}]) == "<s>the"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}]) == [1, the]


def test_ends_are_those_named_and_the_end_of_a_turn(byte_level_metadata: dict[str, Any]) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.eos_token_id": 264}
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (264,)
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 265}).eos_token_ids == (264, 265)
    chat = metadata | {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|><|eot_id|>"}
    assert Tokenizer.from_gguf(chat).eos_token_ids == (264, 265)


def test_the_template_for_tools_is_used_with_tools(byte_level_metadata: dict[str, Any]) -> None:
    templates = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "{{ tools[0].name }}",
    }
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | templates)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"name": "add"}]) == "add"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"pre": "martian"}, "pre 'martian' is not supported; supported are default, gpt-2, .*qwen2"),
        ({"model": "bert"}, "model 'bert' is not supported; supported are gpt2, llama"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, "tokens has 'a' more than once"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["h e", "hello"]}, "merges has 'hello'"),
        ({"merges": ["h e l"]}, "merges has 'h e l'"),
        ({"merges": ["h q"]}, "merges does not fit tokenizer.ggml.tokens: .*hq"),
        ({"token_type": [1, 1]}, "token_type has 2 values for 267 tokens"),
        ({"bos_token_id": 267}, "bos_token_id 267 is outside the vocabulary of 267 ids"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for a bos token but has no"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_at_fault_is_named(
    byte_level_metadata: dict[str, Any], fields: dict[str, Any], complaint: str
) -> None:
    stated = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    with pytest.raises(ValueError, match=complaint):
        Tokenizer.from_gguf(byte_level_metadata | stated)


def test_a_file_without_rules_is_cut_by_the_default_ones_with_a_warning(
    byte_level_metadata: dict[str, Any],
) -> None:
    metadata = {name: value for name, value in byte_level_metadata.items() if name != "tokenizer.ggml.pre"}
    with pytest.warns(UserWarning, match=r"no tokenizer\.ggml\.pre"):
        tokenizer = Tokenizer.from_gguf(metadata)
    stated = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "default"})
    assert tokenizer.encode(PRE_RULES_TEXT) == stated.encode(PRE_RULES_TEXT)


def test_one_token_alone_keeps_its_space_and_shows_special_text(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the")[-1]
    assert sentencepiece.token_text(the) == " the"
    assert sentencepiece.token_text(1) == "<s>"
    assert sentencepiece.token_text(3 + 0xF0) == "\ufffd"
    assert sentencepiece.token_text(10_000) == ""


def test_a_model_without_template_says_so(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        byte_level.render_chat([{"role": "user", "content": "hi"}])

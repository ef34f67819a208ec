from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxserve.text import Tokenizer
from tests.text.test_gguf_tokenizer import vectors

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_qwen3_cuts_text_as_llama_cpp_cuts_it_for_qwen2(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "tokenizers/qwen3")
    for text, ids in vectors(shared_data, "qwen2"):
        assert tokenizer.encode(text) == ids
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids] == ["<|im_end|>"]


def test_a_trained_llama_folder(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models/stories260K/hf")
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2, 1)
    ids = tokenizer.encode("Once upon a time")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "Once upon a time"
    assert (
        tokenizer.decode(ids[3:], prompt_ids=ids[:3])
        == tokenizer.backend.decode(ids)[len(tokenizer.backend.decode(ids[:3])) :]
    )


def test_a_lone_tokenizer_file_is_enough(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.vocab_size == 267
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


def test_special_tokens_come_from_the_small_files(folder: Path) -> None:
    write(folder / "special_tokens_map.json", {"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"})
    write(
        folder / "tokenizer_config.json",
        {"bos_token": {"content": "<|start|>"}, "pad_token": None, "chat_template": "{{ bos_token }}"},
    )
    write(folder / "generation_config.json", {"eos_token_id": [7, 265]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 264
    assert tokenizer.eos_token_ids == (265, 7)
    assert tokenizer.render_chat(HI) == "<|start|>"
    write(folder / "generation_config.json", {"eos_token_id": 9})
    assert Tokenizer.from_folder(folder).eos_token_ids == (265, 9)


@pytest.mark.parametrize(("flags", "marked"), [({}, False), ({"add_bos_token": True}, True)])
def test_the_config_can_ask_for_a_bos(folder: Path, flags: dict[str, bool], marked: bool) -> None:
    write(folder / "tokenizer_config.json", {"bos_token": "<|start|>"} | flags)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("h")[0] == tokenizer.bos_token_id) is marked


def test_the_newest_place_of_a_chat_template_wins(folder: Path) -> None:
    listed = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    write(folder / "tokenizer_config.json", {"chat_template": listed})
    assert Tokenizer.from_folder(folder).render_chat(HI) == "list"
    assert Tokenizer.from_folder(folder).render_chat(HI, tools=[{"name": "add"}]) == "tools"
    write(folder / "chat_template.json", {"chat_template": "json"})
    assert Tokenizer.from_folder(folder).render_chat(HI) == "json"
    write(folder / "chat_template.jinja", "jinja")
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates" / "tool_use.jinja", "more tools")
    assert Tokenizer.from_folder(folder).render_chat(HI) == "jinja"
    assert Tokenizer.from_folder(folder).render_chat(HI, tools=[{"name": "add"}]) == "more tools"


def test_the_training_runs_truncation_and_padding_are_dropped(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"
    assert len(tokenizer.encode("h")) == 1


def test_metaspace_spells_spaces(folder: Path, sentencepiece: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(sentencepiece.backend.to_str())
    backend.decoder = decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("the the")) == "the the"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a readable tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json holds a list"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', r"eos_token_id \['a'\]"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default"}]}',
            "expected a text or named texts",
        ),
        ("tokenizer_config.json", '{"eos_token": "<gone>"}', "'<gone>' as its eos_token"),
    ],
)
def test_a_file_at_fault_is_named(folder: Path, name: str, text: str, complaint: str) -> None:
    write(folder / name, text)
    with pytest.raises(ValueError, match=complaint):
        Tokenizer.from_folder(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "complaint"),
    [
        (decoders.WordPiece(), "unsupported tokenizer decoder .*WordPiece"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "unsupported .*Strip"),
        (None, "has no decoder"),
    ],
)
def test_an_unsupported_decoder_is_named(decoder: Any, complaint: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match=complaint):
        Tokenizer(backend)

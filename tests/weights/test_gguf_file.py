"""GGUF files that are damaged, or hold what cannot be read."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from jaxserve.weights import open_checkpoint


@pytest.fixture
def path(tiny_config, random_tensors, write_gguf):
    config = tiny_config("llama")
    return write_gguf("llama", config, random_tensors(config))


def header(version=3, num_tensors=0, num_values=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(40), r"starts with b'PK\\x03\\x04', expected b'GGUF'"),
        (header(version=1), r"GGUF version 1; supported: \(2, 3\)"),
        (header(version=3 << 24), "GGUF version 50331648; supported"),
        (header(num_values=1), "truncated: the header needs 8 bytes at byte 24, the file ends at 24"),
        (header(num_values=1, rest=text(b"k") + struct.pack("<I", 99)), "unknown metadata type 99"),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 5)),
            "truncated inside a list of strings",
        ),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 60)),
            "truncated.*byte",
        ),
        (
            header(num_values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 40)),
            "truncated: the header needs",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<I", 99)),
            "tensor t has 99 dimensions, at most",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 20, 0)),
            "tensor t has type IQ4_NL; supp",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0)),
            "tensor t has type number 999",
        ),
        (
            header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)),
            "rows of 33 elements, expected a",
        ),
        (
            header(num_tensors=2, rest=2 * (text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0))),
            "tensor t is listed twice",
        ),
        (header(), "general.architecture is missing"),
    ],
)
def test_damaged_headers(content, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad.gguf: .*{message}"):
        open_checkpoint(path)


def test_nothing_to_embed_with(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("attention.head_count", "embedding_length", "block_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_tensor("other", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"bare.gguf: tensor token_embd.weight is missing"):
        open_checkpoint(path)


def test_every_kind_of_value(tiny_config, random_tensors, tmp_path, path):
    """Values of each type, nested lists and bytes that are no UTF-8 among them, as gguf writes them."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "llama")
    for key, value in open_checkpoint(path).metadata.items():
        if key.startswith("llama"):
            writer.add_key_value(key, value, reader.get_field(key).types[0])
    kinds = gguf.GGUFValueType
    given = {
        "x.u8": (200, kinds.UINT8),
        "x.i8": (-100, kinds.INT8),
        "x.u16": (60000, kinds.UINT16),
        "x.i16": (-30000, kinds.INT16),
        "x.i32": (-5, kinds.INT32),
        "x.u64": (1 << 40, kinds.UINT64),
        "x.i64": (-(1 << 40), kinds.INT64),
        "x.f64": (0.1, kinds.FLOAT64),
        "x.nested": ([[1, 2], [3]], kinds.ARRAY),
        "x.texts": (["", "é"], kinds.ARRAY),
        "x.bytes": (b"\xff\xfe", kinds.STRING),
    }
    for key, (value, kind) in given.items():
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_checkpoint(tmp_path / "more.gguf").metadata
    assert metadata is not None
    expected = {key: value for key, (value, _) in given.items()} | {"x.bytes": "\udcff\udcfe"}
    assert {key: metadata[key] for key in given} == expected

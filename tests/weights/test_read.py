"""Parameters as they are read, against a plain statement of the layout; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxserve.model.parameters import model_parameters
from jaxserve.weights import open_checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe")


def read(path, compute_format="float32"):
    return dict(open_checkpoint(path).read(compute_format))


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_folder_is_read_as_the_canonical_layout(
    family, tiny_config, random_tensors, canonical, write_hf
):
    config = tiny_config(family)
    tensors = random_tensors(config)
    assert_equal(read(write_hf(config, tensors)), canonical(config, tensors))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_is_read_as_the_same_parameters(family, tiny_config, random_tensors, canonical, write_gguf):
    config = tiny_config(family)
    tensors = random_tensors(config)
    assert_equal(read(write_gguf(family, config, tensors)), canonical(config, tensors))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_describe_the_same_model(family, tiny_config, random_tensors, write_hf, write_gguf):
    config = tiny_config(family, rms_norm_eps=2.0**-16)
    tensors = random_tensors(config)
    from_hf = open_checkpoint(write_hf(config, tensors)).config
    from_gguf = open_checkpoint(write_gguf(family, config, tensors)).config
    assert replace(from_gguf, family=from_hf.family) == from_hf


@pytest.mark.parametrize("compute_format", ["float32", "bfloat16"])
def test_arrays_have_the_declared_shapes_and_formats(
    compute_format, tiny_config, random_tensors, canonical, write_hf
):
    config = tiny_config("qwen3_moe", mlp_only_layers=[0])
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_hf(config, tensors))
    expected = canonical(config, tensors)
    compute_dtype = np.dtype(ml_dtypes.bfloat16 if compute_format == "bfloat16" else np.float32)
    declared = dict(model_parameters(checkpoint.config))
    found = dict(checkpoint.read(compute_format))
    assert list(found) == list(declared)
    for name, info in declared.items():
        array = found[name]
        assert array.dtype == (np.float32 if info.full_precision else compute_dtype), name
        assert array.shape == info.shape
        assert array.flags.c_contiguous
        assert array.flags.owndata
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_safetensors(dtype, tiny_config, random_tensors, canonical, write_hf):
    config = tiny_config("gemma3")
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors(config).items()}
    exact = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    path = write_hf(config, tensors)
    assert_equal(read(path), canonical(config, exact))
    embed = read(path, "bfloat16")["embed"]
    np.testing.assert_array_equal(embed, exact["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))


def test_shards_with_an_index(tiny_config, random_tensors, canonical, write_hf):
    config = tiny_config("mistral")
    tensors = random_tensors(config)
    assert_equal(read(write_hf(config, tensors, shards=3)), canonical(config, tensors))


def test_tensors_larger_than_a_slab_are_read_whole(
    tiny_config, random_tensors, canonical, write_hf, write_gguf
):
    """Wide enough that every matrix is cut, rows of a single head among them."""
    config = tiny_config(
        "llama",
        num_hidden_layers=1,
        hidden_size=4096,
        intermediate_size=96,
        num_attention_heads=2,
        vocab_size=33,
    )
    tensors = random_tensors(config)
    expected = canonical(config, tensors)
    assert_equal(read(write_hf(config, tensors)), expected)
    assert_equal(read(write_gguf("llama", config, tensors)), expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_encodings(kind, tiny_config, random_tensors, canonical, write_gguf):
    """Matrices in each type that gguf can write, against its own dequantisation of whole tensors."""
    config = tiny_config("qwen2")
    tensors = random_tensors(config)
    expected = canonical(config, {name: rounded(tensor, kind) for name, tensor in tensors.items()})
    assert_equal(read(write_gguf("qwen2", config, tensors, kind)), expected)


def rounded(tensor, kind):
    if tensor.ndim == 1:
        return tensor
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_k_quants(kind, tmp_path, tiny_config, random_tensors, write_gguf, monkeypatch):
    """gguf cannot write these, so the blocks are random bytes under finite scales."""
    config = tiny_config("qwen2", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    blocks = {}

    def random_blocks(tensor, wanted):
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[wanted]
        if wanted == gguf.GGMLQuantizationType.F32:
            return tensor
        generator = np.random.default_rng(tensor.size)
        raw = generator.integers(0, 256, (tensor.size // block_size, block_bytes), np.uint8)
        # The half-precision scales lie at either end, by type; a small exponent keeps them finite.
        for odd in (1, 3, block_bytes - 1, block_bytes - 3):
            raw[:, odd] &= 0x3B
        blocks[tensor.shape] = raw.reshape(tensor.shape[0], -1)
        return blocks[tensor.shape]

    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    found = read(write_gguf("qwen2", config, random_tensors(config), kind))
    for name, shape in (("embed", (96, 256)), ("layers.1.down", (256, 256)), ("layers.0.o", (256, 256))):
        expected = gguf.quants.dequantize(blocks[shape], gguf.GGMLQuantizationType[kind])
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found[name].reshape(shape), expected)


def test_llama_rotary_rows_are_put_back_in_order(tiny_config, random_tensors, write_gguf):
    """Rows numbered in rotate-half order come back numbered so from a file that interleaves them."""
    config = tiny_config("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = np.arange(16)[:, None]
    tensors["model.layers.0.self_attn.k_proj.weight"][:] = np.arange(8)[:, None]
    path = write_gguf("llama", config, tensors)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.attn_k.weight"][:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    qkv = read(path)["layers.0.qkv"]
    assert qkv[0, :3, :, 0].tolist() == [list(range(8)), list(range(8, 16)), list(range(8))]


def test_gguf_metadata_is_plain_python(tiny_config, random_tensors, write_gguf, write_hf):
    config = tiny_config("llama")
    tensors = random_tensors(config)
    given = {
        "tokenizer.ggml.tokens": ["a", "Ġb", "é\n"],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
        "tokenizer.ggml.token_type": [1, 3, 1],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    metadata = open_checkpoint(write_gguf("llama", config, tensors, metadata=given)).metadata
    assert metadata is not None
    for key, value in given.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    assert metadata["general.architecture"] == "llama"
    assert open_checkpoint(write_hf(config, tensors)).metadata is None


def test_fingerprint_follows_content(tiny_config, random_tensors, write_hf):
    config = tiny_config("llama")
    tensors = random_tensors(config)
    first = open_checkpoint(write_hf(config, tensors)).fingerprint
    assert open_checkpoint(write_hf(config, tensors)).fingerprint == first
    tuned = {name: tensor * 1.01 for name, tensor in tensors.items()}
    assert open_checkpoint(write_hf(config, tuned)).fingerprint != first
    assert open_checkpoint(write_hf(config | {"rope_theta": 1e4}, tensors)).fingerprint != first


def test_unknown_compute_format_is_refused_at_once(tiny_config, random_tensors, write_hf):
    config = tiny_config("llama")
    checkpoint = open_checkpoint(write_hf(config, random_tensors(config)))
    with pytest.raises(ValueError, match="compute_format 'float16' is not one of float32, bfloat16"):
        checkpoint.read("float16")


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("format_", ["hf", "gguf"])
class TestTensorTable:
    """Each fault names the file, the tensor and what was expected."""

    @pytest.fixture
    def write(self, format_, write_hf, write_gguf, tiny_config):
        config = tiny_config("llama")
        return lambda tensors: (
            write_hf(config, tensors) if format_ == "hf" else write_gguf("llama", config, tensors)
        )

    @pytest.fixture
    def tensors(self, tiny_config, random_tensors):
        return random_tensors(tiny_config("llama"))

    def test_missing(self, write, tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match=r"model\S*: tensor \S*1\S*up\S* is missing.*\(160, 64\)"):
            open_checkpoint(write(tensors))

    def test_surplus(self, write, tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
        with pytest.raises(ValueError, match=r"model\.\w+: tensor \S*q\S*bias is surplus, no llama"):
            open_checkpoint(write(tensors))

    def test_wrong_shape(self, write, tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((160, 64), np.float32)
        with pytest.raises(
            ValueError, match=r"model\.\w+: tensor \S*down\S* has shape \(160, 64\), expected"
        ):
            open_checkpoint(write(tensors))

    @pytest.mark.parametrize("kept", [0, 5, 60, 3000, 0.5, -1])
    def test_truncated(self, write, tensors, kept, format_):
        path = write(tensors)
        file = path / "model.safetensors" if format_ == "hf" else path
        content = file.read_bytes()
        file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else kept])
        with pytest.raises(ValueError, match=r"model\.\w+: (truncated|empty)"):
            open_checkpoint(path)

    def test_truncated_after_opening(self, write, tensors, format_):
        path = write(tensors)
        checkpoint = open_checkpoint(path)
        file = path / "model.safetensors" if format_ == "hf" else path
        file.write_bytes(file.read_bytes()[:30_000])
        with pytest.raises(ValueError, match=r"model\.\w+: truncated inside tensor \S+, \d+ bytes short"):
            list(checkpoint.read("float32"))


def test_redundant_tensors_are_accepted(tiny_config, random_tensors, canonical, write_hf):
    """Stored rotary frequencies, and the stored head of a tied model, are not parameters."""
    config = tiny_config("llama")
    tensors = random_tensors(config)
    expected = canonical(config, tensors)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    tensors["lm_head.weight"] = np.zeros((96, 64), np.float32)
    assert_equal(read(write_hf(config, tensors)), expected)


class TestSafetensorsFiles:
    @pytest.fixture
    def folder(self, tiny_config, random_tensors, write_hf):
        config = tiny_config("llama")
        return write_hf(config, random_tensors(config), shards=2)

    def edit_index(self, folder, change):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_no_weights(self, folder):
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(
            ValueError, match=r"expected model.safetensors or \S*json, found \['model-00001-of"
        ):
            open_checkpoint(folder)

    def test_missing_shard(self, folder):
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: missing, but named in"):
            open_checkpoint(folder)

    def test_tensor_not_in_its_shard(self, folder):
        self.edit_index(folder, lambda names: names.update({"extra": "model-00001-of-00002.safetensors"}))
        with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: tensor extra is missing"):
            open_checkpoint(folder)

    def test_shard_outside_the_folder(self, folder):
        self.edit_index(folder, lambda names: names.update({"extra": "../other.safetensors"}))
        with pytest.raises(
            ValueError, match=r"extra is in '\.\./other.safetensors', expected the name of a file"
        ):
            open_checkpoint(folder)

    def test_tensor_in_two_shards(self, folder):
        first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        second.write_bytes(first.read_bytes())
        with pytest.raises(ValueError, match=r"model-00002-of-\S+: tensor .* is also in model-00001"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
    def test_empty_index(self, folder, index):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"index.json: weight_map is .*, expected tensor names"):
            open_checkpoint(folder)

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b"{]", "not valid JSON"),
            (b"[]", "not an object"),
            (
                b'{"a": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}',
                "type F8_E5M2; supported: F32",
            ),
            (
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
                r"shape \(2,\) .* spans 4 bytes",
            ),
            (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', "malformed entry"),
            (b'{"a": {"dtype": "F32"}}', "malformed entry"),
        ],
    )
    def test_malformed_header(self, folder, header, message):
        (folder / "model-00001-of-00002.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes(64)
        )
        with pytest.raises(ValueError, match=rf"model-00001-of-00002.safetensors: .*{message}"):
            open_checkpoint(folder)

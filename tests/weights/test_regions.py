"""Parts of parameters, as processes of a job read them: the same numbers, from no more bytes than need be."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.weights import open_checkpoint
from jaxserve.weights.safetensors_folder import read_safetensors


def bytes_read() -> int:
    """By this process so far, from files and anything else."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("form", ["hf", "gguf"])  # GGUF in blocks, which are read whole
def test_each_half_of_every_axis(family, form, tiny_config, random_tensors, write_hf, write_gguf):
    config = tiny_config(family)
    tensors = random_tensors(config)
    path = write_hf(config, tensors) if form == "hf" else write_gguf(family, config, tensors, "Q4_0")
    checkpoint = open_checkpoint(path)
    whole = dict(checkpoint.read("float32"))
    most_axes = max(array.ndim for array in whole.values())
    for axis, second in itertools.product(range(most_axes), (False, True)):

        def half(name, shape, axis=axis, second=second):
            if axis >= len(shape):
                return None
            middle = shape[axis] // 2
            cuts = [slice(0, size) for size in shape]
            cuts[axis] = slice(middle, shape[axis]) if second else slice(0, middle)
            return tuple(cuts)

        for name, array in checkpoint.read("float32", half):
            region = half(name, array.shape) or ()
            np.testing.assert_array_equal(array[region], whole[name][region], err_msg=name)


@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(0, 256), None), (None, slice(256, 512)), (slice(3, 4),) * 2]
)
def test_only_the_bytes_of_a_part_are_read(tmp_path, rows, columns):
    values = np.random.default_rng(0).normal(size=(1024, 1024)).astype(ml_dtypes.bfloat16)
    save_file({"w": values}, tmp_path / "w.safetensors")
    tensor = read_safetensors(tmp_path / "w.safetensors")["w"]
    region = (rows or slice(None), columns or slice(None))
    wanted = np.zeros(values.shape, np.bool_)
    wanted[region] = True
    view = np.full(values.shape, -1.0, np.float32)
    before = bytes_read()
    tensor.read_into(view, wanted)
    num_read = bytes_read() - before
    np.testing.assert_array_equal(view[region], values[region].astype(np.float32))
    assert (view[~wanted] == -1).all()
    assert wanted.sum() * 2 <= num_read < wanted.sum() * 2 + 2000  # what /proc itself says of it

"""What a model's makers recommend, out of `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.weights.generation_config import read_sampling_defaults


def test_recommendations_are_read_by_the_library_s_names(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 99,'
        ' "min_p": null, "do_sample": true, "eos_token_id": 2}'
    )
    assert read_sampling_defaults(tmp_path) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }


@pytest.mark.parametrize("text", ['{"top_p": 2.0}', '{"temperature": "hot"}', "[]", "{"])
def test_what_cannot_be_is_refused_with_the_file_s_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json: "):
        read_sampling_defaults(tmp_path)

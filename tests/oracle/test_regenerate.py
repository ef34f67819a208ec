"""That transformers, where it is installed, still gives the stored answers, and that a change shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.cases import load_cases, save_cases

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:::torch", "ignore:::transformers"),
]


@pytest.fixture(scope="module")
def regenerate() -> Callable[[Sequence[str]], int]:
    """The command, its imports of torch and transformers done."""
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"needs {module}, of the oracle extra")
    from tests.oracle.regenerate import main

    return main


def test_two_models_still_agree(
    regenerate: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert regenerate(["--check", "mistral_window", "qwen3_moe_dense_layer"]) == 0
    assert capsys.readouterr().out == "mistral_window: agrees\nqwen3_moe_dense_layer: agrees\n"


def _store_tampered(name: str, folder: Path) -> None:
    """Store the answers with one logit and one greedy token changed."""
    stored = load_cases(name)
    logits = stored.cases[1].logits.copy()
    logits[2, 3] += 1e-3
    greedy_ids = stored.cases[3].greedy_ids.copy()
    greedy_ids[60] += 1
    cases = list(stored.cases)
    cases[1] = replace(cases[1], logits=logits)
    cases[3] = replace(cases[3], greedy_ids=greedy_ids)
    save_cases(replace(stored, cases=tuple(cases)), folder)


def test_a_difference_is_named_and_fails(
    regenerate: Callable[[Sequence[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _store_tampered("mistral_window", tmp_path)
    assert regenerate(["--check", "--data", str(tmp_path), "mistral_window"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "mistral_window: differs"
    assert output[1].startswith("  cases[1].logits: differs by up to 0.001")
    assert output[2].startswith("  cases[3].greedy_ids: stored [")
    assert len(output) == 3


def test_writing_gives_the_stored_answers(regenerate: Callable[[Sequence[str]], int], tmp_path: Path) -> None:
    assert regenerate(["--data", str(tmp_path), "qwen3_untied"]) == 0
    fresh, stored = load_cases("qwen3_untied", tmp_path), load_cases("qwen3_untied")
    assert fresh.weights_sha256 == stored.weights_sha256
    for ours, theirs in zip(fresh.cases, stored.cases, strict=True):
        np.testing.assert_array_equal(ours.greedy_ids, theirs.greedy_ids)
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)


def test_unknown_names_are_refused(
    regenerate: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        regenerate(["--check", "gpt2"])
    assert "no model is called gpt2; there are llama_mha" in capsys.readouterr().err

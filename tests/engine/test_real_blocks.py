"""A real model from the blocks of its GGUF file, against stored answers of transformers."""

from __future__ import annotations

import jax
import pytest

from jaxserve import LLM
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.options import EngineOptions
from jaxserve.plan import SamplingParams
from jaxserve.quantization import STORED
from jaxserve.weights import open_checkpoint, pull
from tests.oracle.cases import load_smollm2

NUM_FROM_BLOCKS = 16


@pytest.mark.real
def test_smollm2_answers_the_same_from_the_blocks_of_its_file() -> None:
    path = pull("smollm2-135m", progress=False)
    checkpoint = open_checkpoint(path)
    cases = [case for case in load_smollm2().cases[:2] if case.num_exact() >= NUM_FROM_BLOCKS]
    assert len(cases) == 2
    prompts = [case.prompt_ids.tolist() for case in cases]
    with LLM(path, quantize=STORED, max_model_len=256, num_slots=2, max_chunk=32) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=NUM_FROM_BLOCKS, ignore_eos=True)
        )
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids == case.greedy_ids[:NUM_FROM_BLOCKS].tolist()
    # Five bits a weight, as in the file, whose header and tokenizer make up the rest.
    params = load_parameters(checkpoint, configure(checkpoint, EngineOptions(quantize=STORED)))
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(params))
    assert 0.95 * path.stat().st_size < num_bytes < path.stat().st_size

"""Run by a test in a process with eight CPU devices: the library's answers over a real model, as JSON.

python -m tests.sharding.golden MODEL MESH... < prompts.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxserve import LLM, SamplingParams


def main() -> None:
    """Greedy answers on each mesh to prompts of token ids, each with the tokens that it is to have."""
    model, *meshes = sys.argv[1:]
    asked: list[tuple[list[int], int]] = json.load(sys.stdin)
    prompts: list[Any] = [prompt for prompt, _ in asked]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in asked]
    found: dict[str, list[list[int]]] = {}
    for mesh in meshes:
        with LLM(model, mesh=mesh, max_model_len=256, num_slots=4, max_chunk=16) as llm:
            assert llm.config.mesh
            found[mesh] = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
            assert llm.compiles_after_ready == 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()

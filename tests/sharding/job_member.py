"""Run by tests: one process of a job, that answers through the library.

    python -m tests.sharding.job_member MODEL MESH SETTINGS [PLACE]

Prints the answers as one JSON object; `SETTINGS` is another, of what `LLM` takes, PLACE as commands take it.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.commands.processes import add_process_arguments, join_processes

PROMPTS = ["Once upon a time", "The cat", "Tom said hello to the big", "Once upon a time there was a dog"]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "mesh", "settings"):
        parser.add_argument(name)
    add_process_arguments(parser)
    args = parser.parse_args()
    join_processes(args)
    settings: dict[str, Any] = {"num_slots": 2, "max_model_len": 64, "max_chunk": 16, "dtype": "float32"}
    settings |= {"mesh": args.mesh or None, "progress": False, **json.loads(args.settings)}
    with LLM(args.model, **settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
        sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16, presence_penalty=0.3)
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False) + llm.generate(
            PROMPTS[:2], sampled, use_tqdm=False
        )
        tokens = [output.outputs[0].token_ids for output in outputs]
        print(json.dumps({"process": os.getpid(), "tokens": tokens}))


if __name__ == "__main__":
    main()

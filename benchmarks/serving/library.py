"""The same work without a server: what the library makes of all prompts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.serving.workload import Prompt
from jaxserve import LLM, SamplingParams


class Library:
    """A model in this process, whose rate is the server's yardstick."""

    def __init__(self, model: str, *, num_slots: int, max_model_len: int | None, ignore_eos: bool) -> None:
        self._llm = LLM(model, num_slots=num_slots, max_model_len=max_model_len)
        self._ignore_eos = ignore_eos

    def tokens_per_second(self, prompts: Sequence[Prompt]) -> float:
        """Output tokens a second, from the first request to the last answer."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=self._ignore_eos)
            for prompt in prompts
        ]
        start = time.perf_counter()
        outputs = self._llm.generate([prompt.content for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

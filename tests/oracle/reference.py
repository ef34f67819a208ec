"""What transformers answers: float32 on CPU, eager attention and experts. Needs the oracle extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from tests.oracle.cases import NUM_GREEDY, FloatArray, IntArray, OracleCase

logging.disable_progress_bar()

Model = Any
"""A transformers causal language model; the library types none of what is used here."""

MIN_MARGIN = 2e-3
"""No stored greedy choice of a tiny model is closer, so that tests compare its answers exactly."""
MIN_ROUTER_GAP = 2e-4
"""Likewise for the last expert that is chosen and the first that isn't, in router logits."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: on a busy machine these short steps wait for the second (measured, 10x)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_reference(folder: Path, gguf_file: str | None = None) -> Model:
    """The model in `folder`, in float32. Raises ValueError unless every tensor found its place."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf_file,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    model, info = loaded
    faults = {kind: sorted(names) for kind, names in info.items() if names}
    if faults:
        raise ValueError(f"transformers loaded {folder} with {faults}")
    return model.eval()


def greedy_ids(model: Model, prompt_ids: IntArray) -> IntArray:
    """[NUM_GREEDY] the most likely continuation, past any end-of-sequence id, with the KV cache."""
    cache = DynamicCache(config=model.config)
    tokens = torch.as_tensor(prompt_ids, dtype=torch.long)[None]
    chosen: list[int] = []
    with torch.inference_mode():
        while len(chosen) < NUM_GREEDY:
            logits = model(tokens, cache=cache, use_cache=True).logits[0, -1]
            chosen.append(int(logits.argmax()))
            tokens = torch.tensor([[chosen[-1]]])
    return np.asarray(chosen, np.int32)


def all_logits(model: Model, token_ids: IntArray) -> FloatArray:
    """[tokens, V] logits after every token, in one forward without a cache."""
    with torch.inference_mode():
        tokens = torch.as_tensor(token_ids, dtype=torch.long)[None]
        return model(tokens, use_cache=False).logits[0].numpy()


def top2_margins(logits: FloatArray) -> FloatArray:
    """[rows] the largest logit of each row of [rows, V] less the second largest."""
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def token_logprobs(logits: FloatArray, token_ids: IntArray) -> FloatArray:
    """[rows] log-probability of `token_ids` [rows] under `logits` [rows, V], natural."""
    shifted = (logits - logits.max(axis=-1, keepdims=True)).astype(np.float64)
    chosen = np.take_along_axis(shifted, token_ids[:, None].astype(np.int64), axis=-1)[:, 0]
    return (chosen - np.log(np.exp(shifted).sum(axis=-1))).astype(np.float32)


def continue_prompt(model: Model, prompt_ids: IntArray) -> tuple[IntArray, FloatArray]:
    """The greedy answer, and [P + NUM_GREEDY, V] logits after every token of prompt and answer.

    The answer comes from single steps over the KV cache, the logits from one forward over the whole.
    Raises ValueError where the two choose differently.
    """
    answer = greedy_ids(model, prompt_ids)
    logits = all_logits(model, np.concatenate([prompt_ids, answer]))
    rechosen = logits[len(prompt_ids) - 1 : -1].argmax(axis=-1)
    if not np.array_equal(rechosen, answer):
        step = int(np.flatnonzero(rechosen != answer)[0])
        raise ValueError(
            f"with and without the cache, step {step} chooses {answer[step]} and {rechosen[step]}"
        )
    return answer, logits


def tiny_case(model: Model, prompt_ids: IntArray, positions: IntArray) -> OracleCase:
    """The case of one prompt to a tiny model, with logits at `positions`.

    Raises ValueError where a choice is too close for another implementation to make it the same way.
    """
    answer, logits = continue_prompt(model, prompt_ids)
    length = len(prompt_ids)
    choosing = logits[length - 1 : -1]
    margins = top2_margins(choosing)
    if margins.min() < MIN_MARGIN:
        raise ValueError(f"a top-2 margin of {margins.min():.2g} is below {MIN_MARGIN}: take another seed")
    gap = router_gap(model, np.concatenate([prompt_ids, answer]))
    if gap < MIN_ROUTER_GAP:
        raise ValueError(f"a router gap of {gap:.2g} is below {MIN_ROUTER_GAP}: take another seed")
    return OracleCase(
        prompt_ids=prompt_ids,
        positions=positions,
        logits=logits[positions],
        nll=-token_logprobs(logits[: length - 1], prompt_ids[1:]),
        greedy_ids=answer,
        greedy_logprobs=token_logprobs(choosing, answer),
        margins=margins,
    )


def router_gap(model: Model, token_ids: IntArray) -> float:
    """Smallest gap, over tokens and layers, between the last chosen expert's logit and the next one's.

    Infinite for a model without experts.
    """
    chosen = getattr(model.config, "num_experts_per_tok", None)
    if chosen is None:
        return np.inf
    with torch.inference_mode():
        tokens = torch.as_tensor(token_ids, dtype=torch.long)[None]
        router_logits = model(tokens, use_cache=False, output_router_logits=True).router_logits
    gaps = []
    for layer_logits in router_logits:
        ordered = np.sort(layer_logits.numpy(), axis=-1)[:, ::-1]
        gaps.append((ordered[:, chosen - 1] - ordered[:, chosen]).min())
    return float(min(gaps))

"""The questions that SmolLM2-135M-Instruct is asked, and transformers' answers from its GGUF."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.oracle.cases import IntArray, SmolLM2Cases, TextCase
from tests.oracle.reference import (
    Model,
    all_logits,
    continue_prompt,
    load_reference,
    token_logprobs,
    top2_margins,
)

Messages = tuple[dict[str, str], ...]

PLAIN_PROMPTS: dict[str, str] = {
    "plain capital": "The capital of France is",
    "plain story": "Once upon a time, in a village by the sea, there lived a girl who",
    "plain code": "def fibonacci(n):\n    ",
}
CHAT_PROMPTS: dict[str, Messages] = {
    "chat capital": ({"role": "user", "content": "What is the capital of France?"},),
    "chat system": (
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ),
    "chat turns": (
        {"role": "user", "content": "Name a planet with rings."},
        {"role": "assistant", "content": "Saturn has rings."},
        {"role": "user", "content": "And what are its rings made of?"},
    ),
}
NLL_TOKENS = 256
NLL_TEXT = """\
The lighthouse at the end of the bay had been dark for eleven years when Marta bought it. The agent \
who sold it to her was careful to say that the roof leaked, that the road flooded twice a month, and \
that the nearest shop was nine kilometres away. She signed the papers on the bonnet of his car and asked \
only one question: did the lamp still turn? He did not know. Nobody had climbed the stairs since the \
keeper retired.

On the first evening she counted the steps. There were 142 of them, worn in the middle like old spoons, \
and at the top a glass room full of dust, feathers and light. The lens was whole. It stood on a shallow \
bath of mercury, as such lenses did, so that a child could have pushed its two tons round with one finger. \
Marta pushed. Somewhere below, a chain ran over a wheel, a weight rose in its shaft, and the great glass \
eye began, very slowly, to look out at the sea again.

She wrote that night to her brother: "It works. Come in June, bring a ladder and do not tell Mother about \
the mercury." Then she lit a candle, set it in the middle of the lens, and went outside to see how far a \
single flame could reach.
"""


def smollm2_cases(gguf: Path) -> SmolLM2Cases:
    """Ask transformers all of the above of the model in the file `gguf`."""
    model = load_reference(gguf.parent, gguf.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    nll_ids = _encode(tokenizer, NLL_TEXT)[:NLL_TOKENS]
    cases = [
        _text_case(model, label, _encode(tokenizer, text), text=text) for label, text in PLAIN_PROMPTS.items()
    ]
    for label, messages in CHAT_PROMPTS.items():
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        cases.append(_text_case(model, label, _encode(tokenizer, rendered), messages=messages))
    return SmolLM2Cases(
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        cases=tuple(cases),
        nll_text=tokenizer.decode(nll_ids),
        nll_ids=nll_ids,
        nll=-token_logprobs(all_logits(model, nll_ids)[:-1], nll_ids[1:]),
    )


def _encode(tokenizer: Any, text: str) -> IntArray:
    return np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32)


def _text_case(
    model: Model,
    label: str,
    prompt_ids: IntArray,
    text: str | None = None,
    messages: Messages | None = None,
) -> TextCase:
    answer, logits = continue_prompt(model, prompt_ids)
    choosing = logits[len(prompt_ids) - 1 : -1]
    best = np.argsort(-choosing[0], kind="stable")[:5]
    return TextCase(
        label=label,
        text=text,
        messages=messages,
        prompt_ids=prompt_ids,
        greedy_ids=answer,
        margins=top2_margins(choosing),
        first_step_top5=tuple((int(token_id), float(choosing[0, token_id])) for token_id in best),
    )

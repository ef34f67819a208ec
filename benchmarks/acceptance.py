"""How often do a model and its drafter sample the same? `python -m benchmarks.acceptance PROMPTS`

A drafter that samples uses the noise of the token that it guesses (Gumbel-max, the noise a function of seed
and place), so that answers are what they are without drafts. The standard rule (Leviathan et al. 2023) draws
a draft of q and accepts it with probability min(1, p / q): on average sum(min(p, q)) = 1 - D, D being their
total variation distance, and nothing surpasses that. Two samples with the same noise agree with probability
at least (1 - D) / (1 + D), and exactly, token i is both with probability
1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al. 2024, arXiv 2408.07978).

The model answers prompts, sampling. Then it and each drafter (`skip:N`, its first N layers, or a recipe, the
model itself in that precision) read the answers. Of each position's two distributions, in the same context
and cut off alike, the table has the means of: what agreed with the answers' own noise, what agrees on average
over all noise, what the standard rule accepts, and the bound. `--save FILE` writes the same as JSON.

PROMPTS is as in `benchmarks.speculation`.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe
from benchmarks.speculation import encode, read_prompts
from jaxserve.engine.build import layer_loop_for, local_target
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.sampling import SamplingRows, draw, truncate
from jaxserve.engine.slots import seed_words
from jaxserve.evaluation.sides import Side
from jaxserve.model.cache import make_cache, page_layouts
from jaxserve.model.rows import sequence_rows
from jaxserve.model.transformer import Transformer
from jaxserve.offline import OfflineLoop
from jaxserve.opened_model import OpenedModel, loop_of, open_model
from jaxserve.plan import SamplingParams
from jaxserve.prompts import EncodedPrompt

Floats = npt.NDArray[np.floating[Any]]
Reading = tuple[list[Floats], list[int]]
"""Of an answer: the distribution before each token, and what the request's own noise makes of it."""
_TASKS = ("code", "gsm8k", "chat")


@dataclass(frozen=True)
class Row:
    """A line of the table: means over the positions of all answers."""

    drafter: str
    temperature: float
    top_p: float
    num_positions: int
    agreed: float
    """With the noise of the answers."""
    shared_noise: float
    """As `shared_noise_agreement`."""
    standard_rule: float
    """1 - D."""
    bound: float
    """(1 - D) / (1 + D)."""
    standard_error: float
    """Of `agreed`, for what the noise leaves to chance."""
    num_reproduced: int
    """Answers' tokens that the model samples again where it reads the answers: all, but for rounding."""

    def __str__(self) -> str:
        return (
            f"{self.drafter:<18}{self.temperature:>5.1f}{self.top_p:>7.2f}{self.num_positions:>10}"
            f"{self.agreed:>9.3f}{self.standard_error:>9.3f}{self.shared_noise:>8.3f}{self.standard_rule:>10.3f}"
            f"{self.bound:>7.3f}{self.shared_noise / self.standard_rule:>7.3f}{self.num_reproduced:>12}"
        )


_HEAD = (
    "drafter             temp  top-p positions   agreed  +-error  shared  standard  bound  ratio  reproduced"
)


def shared_noise_agreement(p_V: Floats, q_V: Floats) -> float:
    """How likely two samples by Gumbel-max with the same noise are the same token."""
    both = (p_V > 0.0) & (q_V > 0.0)
    # max(p_j / p_i, q_j / q_i) is the former wherever p_j / q_j is no less than p_i / q_i.
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(p_V + q_V > 0.0, p_V / q_V, 0.0), kind="stable")
    p_up_to = np.cumsum(p_V[order])
    q_after = np.maximum(q_V.sum() - np.cumsum(q_V[order]), 0.0)
    kept = both[order]
    p_V, q_V, p_up_to, q_after = p_V[order][kept], q_V[order][kept], p_up_to[kept], q_after[kept]
    return float(np.sum(1.0 / (p_up_to / p_V + q_after / q_V)))


def standard_agreement(p_V: Floats, q_V: Floats) -> float:
    """How likely the standard rule accepts a sample of q for p: 1 - their total variation distance."""
    return float(np.minimum(p_V, q_V).sum())


def sampling_rows_of(params: SamplingParams, key_2: np.ndarray, position_R: jax.Array) -> SamplingRows:
    """Rows of one request, of its temperature and cuts alone."""
    num_rows = position_R.shape[0]

    def each(value: float) -> jax.Array:
        return jnp.full((num_rows,), value, jnp.float32)

    return SamplingRows(
        slot=jnp.zeros((num_rows,), jnp.int32),
        position=position_R,
        temperature=each(params.temperature),
        top_p=each(params.top_p),
        min_p=each(params.min_p),
        repetition_penalty=each(1.0),
        presence_penalty=each(0.0),
        frequency_penalty=each(0.0),
        top_k=jnp.full((num_rows,), max(params.top_k, 0), jnp.int32),
        key=jnp.broadcast_to(jnp.asarray(key_2), (num_rows, 2)),
        wants_logprobs=jnp.zeros((num_rows,), jnp.bool_),
        drafts=None,
        ahead=0,
    )


class Reader:
    """A model, or its first layers, that reads whole texts of one length at most."""

    def __init__(self, side: Side, context: int, num_layers: int | None) -> None:
        config = side.configure(max_model_len=context)
        layouts = page_layouts(config, jax.default_backend())
        target = local_target()
        transformer = Transformer(config, layouts, layer_loop_for(target), None, target)
        self._chunk = config.chunk_rows[-1]
        self._params = side.params
        self._empty = functools.partial(make_cache, config, layouts)

        def read(params: Any, cache: Any, token_T: jax.Array, start: jax.Array, num: jax.Array) -> Any:
            rows = sequence_rows(config, self._chunk, start, num)
            hidden_TD, cache = transformer.forward(
                params, cache, token_T, rows, single=False, num_layers=num_layers
            )
            return transformer.logits(params, hidden_TD), cache

        self._read = jax.jit(read, donate_argnums=1)

    def logits(self, tokens: list[int], first: int) -> Iterator[jax.Array]:
        """Chunk by chunk float32 `[T, V]`, of the rows from `first` on."""
        cache = self._empty()
        for start in range(0, len(tokens), self._chunk):
            part = np.array(tokens[start : start + self._chunk], np.int32)
            padded = np.pad(part, (0, self._chunk - len(part)))
            logits_TV, cache = self._read(self._params, cache, padded, np.int32(start), np.int32(len(part)))
            if start + len(part) > first:
                yield logits_TV[max(first - start, 0) : len(part)]


@jax.jit
def _sampled(logits_RV: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """The distribution that a row is sampled from, and its sample."""
    return jax.nn.softmax(truncate(logits_RV, rows), axis=-1), draw(logits_RV, rows)


def read_answer(reader: Reader, prompt: list[int], answer: list[int], params: SamplingParams) -> Reading:
    """Read an answer after its prompt."""
    text, first = (prompt + answer)[:-1], len(prompt) - 1
    logits_RV = jnp.concatenate(list(reader.logits(text, first)))
    position_R = jnp.arange(first + 1, first + 1 + len(answer), dtype=jnp.int32)
    # One shape for all answers; what is added is dropped again.
    missing = (params.max_tokens or 0) - len(answer)
    logits_RV = jnp.pad(logits_RV, ((0, missing), (0, 0)))
    position_R = jnp.pad(position_R, (0, missing))
    rows = sampling_rows_of(params, seed_words(params.seed or 0, 0), position_R)
    probability_RV, token_R = _sampled(logits_RV, rows)
    return list(np.asarray(probability_RV)[: len(answer)]), np.asarray(token_R).tolist()[: len(answer)]


def compare(
    drafter: str,
    params: SamplingParams,
    answers: list[list[int]],
    target: list[Reading],
    draft: list[Reading],
) -> Row:
    """What the model and a drafter made of the same answers."""
    agreed = [
        ours == theirs
        for (_, tokens), (_, drafts) in zip(target, draft, strict=True)
        for ours, theirs in zip(tokens, drafts, strict=True)
    ]
    pairs = [
        (p_V.astype(np.float64), q_V.astype(np.float64))
        for (ps, _), (qs, _) in zip(target, draft, strict=True)
        for p_V, q_V in zip(ps, qs, strict=True)
    ]
    shared = np.array([shared_noise_agreement(p_V, q_V) for p_V, q_V in pairs])
    standard = np.array([standard_agreement(p_V, q_V) for p_V, q_V in pairs])
    return Row(
        drafter=drafter,
        temperature=params.temperature,
        top_p=params.top_p,
        num_positions=len(pairs),
        agreed=float(np.mean(agreed)),
        shared_noise=float(shared.mean()),
        standard_rule=float(standard.mean()),
        bound=float((standard / (2.0 - standard)).mean()),
        standard_error=float(np.sqrt((shared * (1.0 - shared)).sum()) / len(pairs)),
        num_reproduced=sum(
            ours == token
            for (_, tokens), answer in zip(target, answers, strict=True)
            for ours, token in zip(tokens, answer, strict=True)
        ),
    )


def make_reader(model: OpenedModel, name: str, side: Side, context: int) -> Reader:
    """Of a drafter by its name; `side` is the model's."""
    kind, _, number = name.partition(":")
    if kind == "skip":
        return Reader(side, context, int(number))
    return Reader(Side(name, model, EngineOptions(quantize=name)), context, None)


def sample_answers(
    model: OpenedModel, options: EngineOptions, prompts: list[list[int]], settings: list[SamplingParams]
) -> list[list[list[int]]]:
    """For each of the settings an answer to each prompt, every one with a seed of its own."""
    loop = OfflineLoop(loop_of(model, model.build_engine(options), options))
    asked = [EncodedPrompt(prompt, None) for prompt in prompts]
    return [
        [
            list(output.outputs[0].token_ids)
            for output in loop.generate(asked, seeded(params, len(prompts)), lambda output: None)
        ]
        for params in settings
    ]


def seeded(params: SamplingParams, number: int) -> list[SamplingParams]:
    """So many requests that differ in their seeds."""
    return [replace(params, seed=seed) for seed in range(number)]


def main() -> None:
    args = _parser().parse_args()
    model = open_model(args.model)
    texts = read_prompts(args.prompts, args.num_prompts)
    prompts = [encode(model.tokenizer, text) for task in args.tasks for text in texts.get(task, ())]
    context = max(map(len, prompts)) + args.max_tokens
    options = EngineOptions(quantize=args.quantize, num_slots=4, max_model_len=context)
    side = Side(args.model, model, options)
    machine = describe()
    print(f"{machine}\n{args.model}, {len(prompts)} prompts, {args.max_tokens} tokens of each answer at most")
    settings = [
        SamplingParams(temperature=temperature, top_p=top_p, max_tokens=args.max_tokens)
        for temperature in args.temperatures
        for top_p in args.top_p
    ]
    answers = sample_answers(model, options, prompts, settings)

    def read_all(reader: Reader) -> list[list[Reading]]:
        return [
            [
                read_answer(reader, *one)
                for one in zip(prompts, answered, seeded(params, len(prompts)), strict=True)
            ]
            for params, answered in zip(settings, answers, strict=True)
        ]

    target = read_all(Reader(side, context, None))
    rows: list[Row] = []
    print(_HEAD, flush=True)
    for name in args.drafters:
        draft = read_all(make_reader(model, name, side, context))
        for line in zip(settings, answers, target, draft, strict=True):
            rows.append(compare(name, *line))
            print(rows[-1], flush=True)
        if args.save:
            head = {"command": shlex.join(sys.argv[1:]), "machine": machine, "model": args.model}
            args.save.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path)
    add("--model", default="smollm2-135m")
    add("--quantize", metavar="RECIPE", default="f32", help="of the model (default %(default)s)")
    add("--drafters", nargs="+", default=["int8", "int4", "w8a8", "skip:26"], metavar="RECIPE or skip:N")
    add("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    add("--top-p", type=float, nargs="+", default=[1.0, 0.9])
    add("--num-prompts", type=int, default=2, help="of each task (default %(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer (default %(default)s)")
    add("--tasks", nargs="+", default=_TASKS)
    add("--save", type=Path, metavar="FILE", help="where to write the table, as JSON")
    return parser


if __name__ == "__main__":
    main()

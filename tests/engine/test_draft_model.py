"""A second model that drafts changes no token, no log-probability and no end, however well it drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.build import configure
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import HostLoop
from jaxserve.plan import ENGINE_DRAFT, SamplingParams, SequencePlan, SlotLoad, StepPlan
from jaxserve.scheduling import CacheIdentity
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.speculation import EngineDrafter, Speculation
from jaxserve.weights import open_checkpoint
from tests.engine.models import serve, small_engine
from tests.engine.test_speculation import cases, facts
from tests.oracle.tiny_models import write_tiny_model
from tests.policies import UNFORESEEN
from tests.remainder_grammars import RemainderGrammars, gated

SPECULATION = Speculation(drafter=EngineDrafter, max_drafts=3, adaptive=False, name="draft:tiny")


def engine_of(model: str, draft: str, tmp_path: Path, **settings: object) -> DeviceEngine:
    folders = {name: write_tiny_model(name, tmp_path / name) for name in {model, draft}}
    return small_engine(folders[model], draft=folders[draft], max_drafts=3, **settings)


def standing_of(loop: HostLoop) -> SpeculationStatistics:
    standing = loop.snapshot().speculation
    assert standing is not None
    return standing


@pytest.mark.parametrize(
    ("draft", "kv_format"),
    [("qwen3_untied", "float32"), ("gemma3", "int8")],
    ids=["fewer tokens in its table", "windows of its own"],
)
def test_its_drafts_change_nothing_to_the_bit(draft: str, kv_format: str, tmp_path: Path) -> None:
    """In batches, in chunks, with prefixes kept and pages so few that some are preempted."""
    engine = engine_of(
        "qwen3",
        draft,
        tmp_path,
        deterministic=True,
        chunk_rows=(16, 64),
        kv_format=kv_format,
        num_pages=14,
    )
    requests = cases() * 2
    plain = serve(HostLoop(engine, overlap=False), requests, together=False)
    loop = HostLoop(
        engine,
        max_chunk=24,
        policy=UNFORESEEN,
        cache=CacheIdentity(model="tiny", kv_format=kv_format),
        speculation=SPECULATION,
    )
    outputs = serve(loop, requests)
    assert list(facts(outputs)) == list(facts(plain))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert 0 < standing_of(loop).num_accepted < standing_of(loop).num_drafted
    assert engine.compiles_after_ready == 0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    """A model with windows that drafts for itself."""
    return engine_of("gemma3", "gemma3", tmp_path_factory.mktemp("own"), chunk_rows=(16, 64))


def test_a_model_agrees_with_itself(own: DeviceEngine) -> None:
    """Sampled or not, after prefixes that others have left, and where windows have passed."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 90, 40).tolist()
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=2, top_p=0.9, n=2)]
    requests = [
        (prompt[:length], replace(params, max_tokens=60, ignore_eos=True))
        for length in (40, 23)
        for params in kinds
    ]
    plain = serve(HostLoop(own), requests)
    loop = HostLoop(own, cache=CacheIdentity(model="tiny", kv_format="float32"), speculation=SPECULATION)
    outputs = serve(loop, requests) + serve(loop, requests[:1])
    for one, other in zip(plain + plain[:1], outputs, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
    assert standing_of(loop).num_accepted == standing_of(loop).num_drafted > 300
    assert own.compiles_after_ready == 0


def test_answers_held_to_a_grammar_are_not_drafted(own: DeviceEngine) -> None:
    grammars = RemainderGrammars(own.limits.vocab_size, own.limits.eos_token_ids[0])
    free = SamplingParams(max_tokens=30, temperature=0.9, seed=2, ignore_eos=True)
    requests = [([5, 6, 7, 8], gated(18, max_tokens=30, temperature=0)), ([9, 8, 7], free)]
    plain = serve(HostLoop(own, grammars=grammars), requests)
    outputs = serve(HostLoop(own, grammars=grammars, speculation=SPECULATION), requests)
    for one, other in zip(plain, outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert outputs[0].drafts.num_drafted == 0 < outputs[1].drafts.num_accepted


def test_it_reads_what_it_is_told_to_before_it_drafts(own: DeviceEngine) -> None:
    """By hand: a prompt read in two parts, then drafts, all accepted, the last of them read after that."""
    prompt, params = list(range(3, 40)), SamplingParams(temperature=0)
    groups = len(own.limits.windows)
    own.load_slot(SlotLoad(1, prompt, len(prompt), 0, ((5, 6, 7, 8),) * groups, params, 0, 0))
    shape = own.limits.fit(len(prompt), 1, 1, False)
    own.collect(own.dispatch(StepPlan.of([SequencePlan(1, len(prompt))], (), shape)))
    answer: list[int] = []
    for unread, reads in [(0, [[1, 0, 30], [1, 30, 7]]), (1, []), (1, [])]:
        for read in reads[:-1]:
            plan = StepPlan.of([], (), shape)
            own.collect(own.dispatch(replace(plan, reads=np.array([read], np.int32))))
        plan = StepPlan.of([SequencePlan(1, 4, 4)], (), own.limits.fit(4, 1, 4, False))
        plan = replace(
            plan,
            drafts=np.array([-1, *[ENGINE_DRAFT] * 3], np.int32),
            unread=np.array([unread], np.int32),
            reads=np.array(reads[-1:], np.int32) if reads else None,
        )
        tokens = own.collect(own.dispatch(plan)).tokens.tolist()
        assert -1 not in tokens
        answer += tokens
    (plain,) = serve(HostLoop(own), [(prompt, replace(params, max_tokens=13, ignore_eos=True))])
    assert plain.outputs[0].token_ids[1:] == answer
    with pytest.raises(ValueError, match="65 tokens to read; the limits say 64"):
        own.dispatch(replace(StepPlan.of([], (), shape), reads=np.array([[1, 0, 65]], np.int32)))


def config_of(model: str, draft: str, tmp_path: Path, **options: object) -> EngineConfig:
    checkpoints = [open_checkpoint(write_tiny_model(name, tmp_path / name)) for name in (model, draft)]
    chosen = EngineOptions(speculative="draft:it", num_slots=2, **options)  # type: ignore[arg-type]
    return configure(checkpoints[0], chosen, checkpoints[1])


def test_it_is_quantised_as_the_model_unless_it_is_said(tmp_path: Path) -> None:
    same = config_of("qwen3", "llama_gqa_tied", tmp_path, quantize="w8a8").draft
    other = config_of("qwen3", "llama_gqa_tied", tmp_path, quantize="w8a8", draft_quantize="int8").draft
    bare = config_of("qwen3", "llama_gqa_tied", tmp_path, quantize="w8a8", draft_quantize="f32").draft
    assert [config and config.recipe for config in (same, other, bare)] == ["w8a8", "int8", None]


def test_its_pools_are_part_of_the_kv_memory(tmp_path: Path) -> None:
    alone = configure(
        open_checkpoint(write_tiny_model("qwen3", tmp_path / "qwen3")),
        EngineOptions(num_slots=2, kv_memory=400_000),
    )
    both = config_of("qwen3", "qwen3", tmp_path, kv_memory=400_000)
    assert both.cache.num_pages[0] == alone.cache.num_pages[0] // 2
    assert both.draft is not None
    assert both.draft.cache.num_pages == both.cache.num_pages


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mistral has windows of \(16,\) and no full attention"):
        config_of("mistral_window", "qwen3", tmp_path)
    short = replace(open_checkpoint(write_tiny_model("qwen3", tmp_path / "q")).config, max_position=100)
    checkpoint = open_checkpoint(write_tiny_model("qwen2", tmp_path / "m"))
    draft = replace(checkpoint, config=short)
    options = EngineOptions(speculative="draft:it", num_slots=2)
    assert configure(checkpoint, options, draft).max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len 101 is out of range: the draft model takes 2 to 100"):
        configure(checkpoint, replace(options, max_model_len=101), draft)
    with pytest.raises(ValueError, match="speculative 'draft:it' needs the draft model opened too"):
        configure(checkpoint, options)
    with pytest.raises(ValueError, match="speculative 'ngram' has no use for a draft model"):
        configure(checkpoint, replace(options, speculative="ngram"), draft)

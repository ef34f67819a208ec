"""The library's face over a fake engine: prompts, parameters, chat, streams, interrupts and errors."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from jaxserve import LLM, AnswerDelta, SamplingParams, start_engine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import LoopStoppedError
from jaxserve.opened_model import EngineSettings
from jaxserve.plan import StepHandle, StepResult
from jaxserve.progress import StageBars
from tests.fake_engine import FakeEngine
from tests.fake_model import BOS, FakeModel
from tests.fake_sequence import expected_answer

SHORT = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)


def make_llm(engine: type[FakeEngine] = FakeEngine, **settings: Any) -> LLM:
    return LLM(FakeModel(engine).opened(), progress=False, **settings)


@pytest.fixture
def fake_llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm
        llm.check_integrity()


# Prompts and parameters ------------------------------------------------------------------------------------


def test_prompts_of_every_form_in_their_order(fake_llm: LLM) -> None:
    prompts: list[Any] = ["hé", [5, 6, 7], {"prompt": "ho"}, {"prompt_token_ids": [9]}]
    prompts.append({"prompt_token_ids": (8, 9), "prompt": "for the record"})
    outputs = fake_llm.generate(prompts, SHORT, use_tqdm=False)
    encode = fake_llm.tokenizer.encode
    expected = [encode("hé"), [5, 6, 7], encode("ho"), [9], [8, 9]]
    assert [output.prompt_token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == ["hé", None, "ho", None, "for the record"]
    for output in outputs:
        sample = output.outputs[0]
        answer = expected_answer(fake_llm.limits, output.prompt_token_ids, SHORT, 1)
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == answer
        assert sample.text == fake_llm.tokenizer.decode(sample.token_ids)
    assert encode("ho")[0] == BOS


@pytest.mark.parametrize("prompt", ["one", [3, 4], {"prompt": "one"}, {"prompt_token_ids": [3]}])
def test_one_prompt_alone_is_a_list_of_one(fake_llm: LLM, prompt: Any) -> None:
    alone = fake_llm.generate(prompt, SHORT)
    listed = fake_llm.generate([prompt], SHORT)
    assert len(alone) == len(listed) == 1
    assert alone[0].outputs == listed[0].outputs


def test_no_prompts_no_results(fake_llm: LLM) -> None:
    assert fake_llm.generate([], SHORT) == fake_llm.chat([], []) == []


def test_parameters_for_all_or_for_each(fake_llm: LLM) -> None:
    prompts = ["a", "b", "c", "d", "e"]
    params = [SamplingParams(max_tokens=number + 1, ignore_eos=True, seed=number) for number in range(5)]
    outputs = fake_llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.seed for output in outputs] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="4 sampling_params for 5 prompts"):
        fake_llm.generate(prompts, params[:4])
    with pytest.raises(TypeError, match=r"sampling_params\[0\] is \{"):
        fake_llm.generate(["a"], [{"max_tokens": 3}])  # type: ignore[list-item]
    default = fake_llm.generate("a")[0].outputs[0]
    assert len(default.token_ids) <= SamplingParams().max_tokens == 16


@pytest.mark.parametrize(
    ("bad", "params", "complaint"),
    [
        ([1] * 128, SHORT, "prompt 2: the prompt has 128 tokens; the limit is 127"),
        ([], SHORT, "prompt 2: the prompt is empty"),
        ([258], SHORT, "prompt 2: unknown token id 258; the vocabulary has 258 ids"),
        ([-1], SHORT, "prompt 2: unknown token id -1"),
        ([0.5], SHORT, "prompt 2: a prompt is a flat sequence of token ids"),
        ({"text": "a"}, SHORT, r"prompt 2: a prompt has the keys \['text'\]"),
        ({"prompt": [1]}, SHORT, r"prompt 2: a prompt has the keys \['prompt'\]; expected prompt, a text"),
        (None, SHORT, "prompt 2: a prompt is None"),
        ("a", SamplingParams(logprobs=6), "prompt 0: logprobs 6 is above the limit, 5"),
        ("a", SamplingParams(bad_token_ids=[999]), "prompt 0: bad_token_ids has token id 999"),
    ],
)
def test_a_bad_prompt_is_named_and_harms_nobody(
    fake_llm: LLM, bad: Any, params: SamplingParams, complaint: str
) -> None:
    stream = fake_llm.stream("meanwhile", SHORT)
    with pytest.raises(ValueError, match=complaint):
        fake_llm.generate(["a", [3], bad], params)
    *_, last = stream
    assert last.output is not None
    assert last.output.outputs[0].token_ids == fake_llm.generate("meanwhile", SHORT)[0].outputs[0].token_ids


@pytest.mark.parametrize("bad", [5, None, b"bytes are no text"])
def test_what_is_no_prompt_at_all(fake_llm: LLM, bad: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        fake_llm.generate(bad, SamplingParams(max_tokens=1, bad_token_ids=[999]))


@pytest.mark.parametrize("name", ["pipeline", "quantise", "tensor_parallel_size"])
def test_an_unknown_argument_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        LLM("no such model, which must not matter", **{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=name):
        start_engine("no such model, which must not matter", **{name: None})  # type: ignore[arg-type]


def test_settings_reach_the_engine() -> None:
    model = FakeModel()
    with LLM(model.opened(), kv_format="int8", num_slots=3, progress=False):
        assert model.options == EngineOptions(kv_format="int8", num_slots=3)


def test_drafted_answers_are_the_same() -> None:
    prompts = ["ab" * 9, "what is said is said again: what is said is said again"]
    with make_llm() as llm, make_llm(speculative="ngram", max_drafts=3) as drafting:
        params = [SamplingParams(max_tokens=60, seed=4, ignore_eos=True), SamplingParams(max_tokens=9, n=2)]
        params[1] = replace(params[1], seed=5, logprobs=2)
        expected, outputs = (one.generate(prompts, params) for one in (llm, drafting))
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    with pytest.raises(ValueError, match="speculative 'guess' is not one of ngram, ngram:TOKENS, skip:N"):
        make_llm(speculative="guess")
    with pytest.raises(ValueError, match="max_drafts 0 is not a whole number"):
        make_llm(speculative="ngram", max_drafts=0)


def test_settings_are_the_fields_of_the_engine_options() -> None:
    assert get_type_hints(EngineSettings) == get_type_hints(EngineOptions)


def test_a_model_s_own_defaults_answer_calls_without_parameters() -> None:
    model = FakeModel()
    model.sampling_defaults = {"temperature": 0.0, "max_tokens": 3}
    with LLM(model.opened(), progress=False) as llm:
        own = SamplingParams(temperature=0.0, max_tokens=3)
        assert llm.get_default_sampling_params() == own
        assert llm.generate("a")[0].outputs == llm.generate("a", own)[0].outputs
        *_, last = llm.stream("a")
        assert last.output is not None
        assert last.output.outputs == llm.generate("a", own)[0].outputs
        llm.generate("a", SamplingParams())
        assert model.device.loads[-1].params == SamplingParams()  # Given ones are taken as they are.
    with LLM(model.opened(), progress=False, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ValueError, match="generation_config 'some' is not one of auto, none"):
        LLM(model.opened(), generation_config="some")  # type: ignore[arg-type]


def test_several_prompts_cannot_be_streamed(fake_llm: LLM) -> None:
    prompts: Any = ["a", "b"]
    with pytest.raises(ValueError, match="begins with 'a'; expected token ids: `generate` and `chat` answer"):
        fake_llm.stream(prompts)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="'nonesuch' names no model"):
        LLM("nonesuch")


def test_bars_of_stages_that_go_on_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.progress._DELAY_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for shown in (True, False):
        with StageBars(shown) as bars:
            for done in range(1, 4):
                bars("load", done, 3)
                bars("compile", done, 5)
        err = capsys.readouterr().err
        assert ("Loading" in err, "Compiling" in err) == (shown, shown)


def test_lines_instead_of_bars_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with StageBars(shown) as bars:
            for done in range(1, 4):
                bars("load", done, 3)
                bars("compile", done, 5)
        err = capsys.readouterr().err
        assert bool(re.fullmatch(r"Loading: 3 tensors in \d+\.\d s\n", err)) is shown
        assert shown or not err


# Chat ------------------------------------------------------------------------------------------------------


def test_chat_puts_conversations_through_the_template(fake_llm: LLM) -> None:
    conversations: list[Any] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]}],
    ]
    both = fake_llm.chat(conversations, SHORT)
    assert [output.prompt for output in both] == ["[user]hi[assistant]", "[system]s[user]t[assistant]"]
    for conversation, output in zip(conversations, both, strict=True):
        ids = fake_llm.tokenizer.encode(output.prompt or "", add_special_tokens=False)
        assert output.prompt_token_ids == ids  # The template did not ask for a beginning of sequence.
        assert fake_llm.chat(conversation, SHORT)[0].outputs == output.outputs
        *_, last = fake_llm.stream_chat(conversation, SHORT)
        assert last.output is not None
        assert last.output.outputs == output.outputs
    closed = fake_llm.chat(conversations[0], SHORT, add_generation_prompt=False)[0]
    assert closed.prompt == "[user]hi"


def test_a_bad_conversation_is_named(fake_llm: LLM) -> None:
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="conversation 1: message 0 has role None"):
        fake_llm.chat([good, [{"content": "hi"}]], SHORT)
    with pytest.raises(ValueError, match="conversation 1: the prompt has 210 tokens; the limit is 127"):
        fake_llm.chat([good, [{"role": "user", "content": "x" * 193}]], SHORT)
    with pytest.raises(ValueError, match="expected a list of messages"):
        fake_llm.chat("hi", SHORT)  # type: ignore[arg-type]
    with (
        LLM(FakeModel(template=None).opened(), progress=False) as llm,
        pytest.raises(ValueError, match="conversation 0: the model has no chat template"),
    ):
        llm.chat(good, SHORT)


# Streams ---------------------------------------------------------------------------------------------------


def test_a_stream_brings_what_generate_brings(fake_llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, n=3, seed=4)
    (whole,) = fake_llm.generate("stream", params)
    deltas = [*fake_llm.stream("stream", params)]
    assert deltas[-1].output is not None
    assert deltas[-1].output.outputs == whole.outputs
    for sample in whole.outputs:
        own = [delta for delta in deltas if delta.index == sample.index]
        assert [token for delta in own for token in delta.token_ids] == sample.token_ids
        assert "".join(delta.text for delta in own) == sample.text


def test_streams_and_generate_share_the_engine(fake_llm: LLM) -> None:
    streams = [fake_llm.stream(text, SHORT) for text in ("a", "b", "c", "d", "e", "f")]
    first = [next(stream) for stream in streams]
    outputs = fake_llm.generate(["g", "h"], SHORT)
    rest = [[*stream] for stream in streams]
    for stream, delta, deltas in zip(streams, first, rest, strict=True):
        assert {stream.request_id} == {each.request_id for each in (delta, *deltas)}
        assert sum(len(each.token_ids) for each in (delta, *deltas)) == 6
        assert [*stream] == []
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]


def test_a_stream_is_refused_at_the_call(fake_llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt has 128 tokens; the limit is 127"):
        fake_llm.stream([1] * 128)


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_leaving_a_stream_frees_what_it_held(fake_llm: LLM, way: str) -> None:
    beside = fake_llm.stream("beside", SHORT)
    stream = fake_llm.stream("long", ENDLESS)
    next(stream)
    if way == "close":
        stream.close()
        stream.close()
        assert [*stream] == []
    elif way == "with":
        with stream as same:
            next(same)
        assert [*stream] == []
    else:
        del stream
        gc.collect()
    assert sum(len(delta.token_ids) for delta in beside) == 6
    fake_llm.check_integrity()


def test_closing_the_last_stream_leaves_the_engine_idle() -> None:
    llm = make_llm()
    stream = llm.stream("long", ENDLESS)
    next(stream)
    stream.close()
    llm.check_integrity()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


# Interrupts and errors -------------------------------------------------------------------------------------


class InterruptedEngine(FakeEngine):
    """Ctrl-C is pressed while the third step runs."""

    def collect(self, handle: StepHandle) -> StepResult:
        if any(handle.plan is plan for plan in self.plans[2:3]):
            os.kill(os.getpid(), signal.SIGINT)
        return super().collect(handle)


def test_an_interrupt_ends_the_call_and_not_the_llm() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with make_llm(InterruptedEngine) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], ENDLESS)
        llm.check_integrity()
        (output,) = llm.generate("a", SHORT)
        expected = expected_answer(llm.limits, output.prompt_token_ids, SHORT, 1)
        assert output.outputs[0].token_ids == expected[0]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupted_stream_can_go_on() -> None:
    with make_llm(InterruptedEngine) as llm:
        stream = llm.stream("a", SHORT)
        deltas: list[AnswerDelta] = []
        with pytest.raises(KeyboardInterrupt):
            deltas.extend(iter(lambda: next(stream), None))
        deltas += stream
        assert sum(len(delta.token_ids) for delta in deltas) == 6


class FailingEngine(FakeEngine):
    """The device goes away in the third step."""

    def collect(self, handle: StepHandle) -> StepResult:
        if any(handle.plan is plan for plan in self.plans[2:3]):
            raise RuntimeError("the device has gone")
        return super().collect(handle)


def test_an_engine_error_reaches_the_caller_and_ends_the_llm() -> None:
    with make_llm(FailingEngine) as llm:
        stream = llm.stream("a", ENDLESS)
        with pytest.raises(RuntimeError, match="the device has gone"):
            llm.generate("b", ENDLESS)
        with pytest.raises(LoopStoppedError, match="the device has gone"):
            list(stream)
        stream.close()
        with pytest.raises(LoopStoppedError, match="the device has gone"):
            llm.generate("b", ENDLESS)

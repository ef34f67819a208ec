"""What a batch answers: the same as the doors, one record for every line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.offline import OfflineLoop
from jaxserve.prompts import EncodedPrompt
from jaxserve.structured import CheckLostError
from tests.fake_model import FakeModel, byte_tokenizer, fake_limits
from tests.fake_sequence import expected_answer
from tests.server.batch.conftest import CHAT, Run, by_name, chat, completion, read_lines, request

TOKENIZER = byte_tokenizer()
MAX_TOKENS = 6


def expected(text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
    from jaxserve.plan import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return expected_answer(fake_limits(), TOKENIZER.encode(text), params, 0)[0]


def test_an_answer_is_a_record_in_openais_format(run: Run, tmp_path: Path) -> None:
    assert run([completion("a", "one")]) == 0
    (record,) = read_lines(tmp_path / "out.jsonl")
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert record["id"].startswith("batch_req_1-")
    assert (record["custom_id"], record["error"]) == ("a", None)
    response = record["response"]
    assert list(response) == ["status_code", "request_id", "body"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["object"] == "text_completion"
    assert body["id"] == response["request_id"]
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["token_ids"] == expected("one")
    assert body["usage"]["completion_tokens"] == MAX_TOKENS


def test_every_line_is_answered_as_if_it_were_alone(run: Run, tmp_path: Path) -> None:
    prompts = [f"{'shared ' * (number % 3)}number {number % 17}" for number in range(60)]
    lines = [completion(f"c{number}", text) for number, text in enumerate(prompts)]
    assert run(lines) == 0
    records = by_name(tmp_path / "out.jsonl")
    assert records.keys() == {line["custom_id"] for line in lines}
    for number, text in enumerate(prompts):
        (choice,) = records[f"c{number}"]["response"]["body"]["choices"]
        assert choice["token_ids"] == expected(text)


def test_several_prompts_and_samples_make_choices_in_order(run: Run, tmp_path: Path) -> None:
    assert run([completion("a", ["one", "two", "three"], n=2, echo=True)]) == 0
    choices = by_name(tmp_path / "out.jsonl")["a"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    spoken = [TOKENIZER.decode(expected(text), skip_special_tokens=True) for text in ("one", "two", "three")]
    assert [choice["text"] for choice in choices] == [
        text + answer for text, answer in zip(("one", "two", "three"), spoken, strict=True) for _ in range(2)
    ]


def test_a_conversation_goes_through_the_template_and_may_fill_the_context(run: Run, tmp_path: Path) -> None:
    assert run([chat("a", "Hi", max_tokens=None)]) == 0
    body = by_name(tmp_path / "out.jsonl")["a"]["response"]["body"]
    prompt = TOKENIZER.encode("[user]Hi[assistant]", add_special_tokens=False)
    assert body["prompt_token_ids"] == prompt
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == fake_limits().max_model_len - len(prompt)


def test_the_models_own_defaults_hold_unless_they_are_not_wanted(
    run: Run, fake: FakeModel, tmp_path: Path
) -> None:
    fake.sampling_defaults = {"max_tokens": 3}
    line = request("a", "/v1/completions", {"prompt": "one", "ignore_eos": True})
    assert run([line]) == 0
    assert by_name(tmp_path / "out.jsonl")["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    (tmp_path / "out.jsonl").unlink()
    assert run([line], "--generation-config", "none") == 0
    assert by_name(tmp_path / "out.jsonl")["a"]["response"]["body"]["usage"]["completion_tokens"] == 16


def test_without_a_seed_the_line_and_the_option_have_one(run: Run, tmp_path: Path) -> None:
    lines = [completion(name, ["one", "one"], temperature=1.0) for name in "abc"]

    def answers(*arguments: str) -> dict[str, Any]:
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        assert run(lines, *arguments) == 0
        records = by_name(tmp_path / "out.jsonl")
        return {
            name: [choice["token_ids"] for choice in record["response"]["body"]["choices"]]
            for name, record in records.items()
        }

    first = answers()
    assert answers() == first
    everything = [tokens for choices in first.values() for tokens in choices]
    assert len({tuple(tokens) for tokens in everything}) == len(everything)
    assert answers("--seed", "1") != first


def test_a_seed_of_its_own_is_kept(run: Run, tmp_path: Path) -> None:
    assert run([completion(name, temperature=1.0, seed=7) for name in "ab"]) == 0
    one, two = (record["response"]["body"]["choices"] for record in by_name(tmp_path / "out.jsonl").values())
    assert one == two


def test_tools_and_forms_are_read_as_at_the_door(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the server extra")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes"]}}}
    lines = [
        chat("call", tools=[tool], tool_choice="required", max_tokens=100, ignore_eos=False),
        chat("form", response_format=schema, max_tokens=100, ignore_eos=False),
        completion("choice", guided_choice=["left", "right"], max_tokens=100, ignore_eos=False),
    ]
    assert run(lines) == 0
    records = by_name(tmp_path / "out.jsonl")
    (choice,) = records["form"]["response"]["body"]["choices"]
    assert json.loads(choice["message"]["content"]) == "yes"
    (choice,) = records["choice"]["response"]["body"]["choices"]
    assert choice["text"] in ("left", "right")
    (choice,) = records["call"]["response"]["body"]["choices"]
    assert choice["message"].get("tool_calls") or choice["finish_reason"] == "length"


def test_the_model_is_called_as_the_command_says(run: Run, tmp_path: Path) -> None:
    lines = [completion("default"), completion("named", model="fake"), completion("other", model="gpt-4o")]
    assert run(lines) == 3
    records = by_name(tmp_path / "out.jsonl")
    assert records["other"]["response"]["status_code"] == 404
    assert "'gpt-4o' is not served here" in records["other"]["response"]["body"]["error"]["message"]
    (tmp_path / "out.jsonl").unlink()
    assert run(lines[::2], "--name", "gpt-4o") == 0
    assert by_name(tmp_path / "out.jsonl")["default"]["response"]["body"]["model"] == "gpt-4o"


BAD_REQUESTS = [
    ({"temperature": -1}, 400, "temperature -1", "temperature"),
    ({"temperature": "hot"}, 400, "temperature", "temperature"),
    ({"nonesuch": 1}, 400, "unknown parameter 'nonesuch'", "nonesuch"),
    ({"prompt": 5}, 400, "prompt is 5", "prompt"),
    ({"prompt": "x" * 200}, 400, "the limit is 127", None),
    ({"prompt": [1, 999]}, 400, "999", None),
    ({"stream": True}, 400, "stream is true", "stream"),
    ({"priority": "nonesuch"}, 400, "'nonesuch' is not a class", None),
    ({"fallback_route": "nonesuch"}, 404, "'nonesuch' is not served here", None),
    ({"cache_salt": "x" * 300}, 400, "cache namespace has 300 characters", None),
    ({"logprobs": 99}, 400, "logprobs 99 is above the limit, 5", "logprobs"),
    ({"logit_bias": {"300": 1}}, 400, "logit_bias has token id 300", "logit_bias"),
]


def test_a_bad_request_gets_the_doors_error_and_the_rest_go_on(run: Run, tmp_path: Path) -> None:
    lines = [completion("first")]
    lines += [
        completion(f"bad {number}", **{"prompt": "p", **bad}) for number, (bad, *_) in enumerate(BAD_REQUESTS)
    ]
    lines += [request("no messages", CHAT, {}), completion("last")]
    assert run(lines) == 3
    records = by_name(tmp_path / "out.jsonl")
    assert len(records) == len(lines)
    for name in ("first", "last"):
        assert records[name]["response"]["status_code"] == 200
    for number, (_, status, complaint, param) in enumerate(BAD_REQUESTS):
        record = records[f"bad {number}"]
        assert record["error"] is None
        assert record["response"]["status_code"] == status
        error = record["response"]["body"]["error"]
        assert complaint in error["message"]
        if param is not None:
            assert error["param"] == param
    assert "messages" in records["no messages"]["response"]["body"]["error"]["message"]


BAD_LINES = [
    ("{", "invalid_json_line", "line 2: it is not valid JSON"),
    ("[1]", "invalid_json_line", "line 2: it is [1]; expected an object"),
    ('{"custom_id": NaN}', "invalid_json_line", "NaN is not JSON"),
    ('"\\ud800"', "invalid_json_line", "surrogate"),
    ("[" * 40 + "]" * 40, "invalid_json_line", "nested too deeply"),
    ("{}", "invalid_line", "custom_id is missing"),
    ('{"custom_id": 5}', "invalid_line", "custom_id is 5; expected a string"),
    ('{"custom_id": "x", "extra": 1}', "invalid_line", "unknown parameter 'extra'"),
    ('{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "invalid_line", "body is missing"),
    (
        '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}',
        "invalid_line",
        "body is []",
    ),
    (json.dumps(completion("x") | {"method": "GET"}), "invalid_method", "method is 'GET'; expected POST"),
    (json.dumps(completion("x") | {"url": "/v1/embeddings"}), "invalid_url", "url is '/v1/embeddings'"),
]


@pytest.mark.parametrize(("bad", "code", "complaint"), BAD_LINES)
def test_a_bad_line_gets_a_record_of_its_own(
    run: Run, tmp_path: Path, bad: str, code: str, complaint: str
) -> None:
    assert run([completion("a"), bad, completion("b")]) == 3
    records = by_name(tmp_path / "out.jsonl")
    (name,) = records.keys() - {"a", "b"}
    record = records[name]
    assert record["id"].startswith("batch_req_2-")
    assert record["response"] is None
    assert record["error"]["code"] == code
    assert complaint in record["error"]["message"]


def test_a_name_is_answered_once(run: Run, tmp_path: Path) -> None:
    lines = [completion("a", "one"), completion("b"), completion("a", "two"), completion("a", "three")]
    lines += [completion("c") | {"url": "nowhere"}, completion("c")]
    assert run(lines) == 3
    records = read_lines(tmp_path / "out.jsonl")
    names = [record["custom_id"] for record in records if record["custom_id"] is not None]
    assert sorted(names) == ["a", "b", "c"]
    (first,) = (record for record in records if record["custom_id"] == "a")
    assert first["response"]["body"]["choices"][0]["token_ids"] == expected("one")
    duplicates = [record["error"] for record in records if record["custom_id"] is None]
    assert {error["code"] for error in duplicates} == {"duplicate_custom_id"}
    assert sorted(error["message"] for error in duplicates) == [
        "line 3: custom_id 'a' is that of line 1 already",
        "line 4: custom_id 'a' is that of line 1 already",
        "line 6: custom_id 'c' is that of line 5 already",
    ]


def test_blank_lines_and_a_byte_order_mark_are_no_lines(run: Run, tmp_path: Path) -> None:
    text = "\ufeff" + json.dumps(completion("a")) + "\r\n\n   \n" + json.dumps(completion("b"))
    (tmp_path / "in.jsonl").write_text(text, encoding="utf-8")
    assert run() == 0
    assert {record["id"].split("-")[0] for record in read_lines(tmp_path / "out.jsonl")} == {
        "batch_req_1",
        "batch_req_4",
    }


def test_a_line_of_many_megabytes_is_refused_and_passed_over(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batch.sources.MAX_LINE_BYTES", 2000)
    assert run([completion("a"), completion("long", "x" * 9000), completion("b")]) == 3
    records = by_name(tmp_path / "out.jsonl")
    assert records.keys() == {"a", None, "b"}
    assert records[None]["error"]["code"] == "line_too_long"


def test_an_empty_batch_has_no_answers(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out.endswith("0 answers, 0 errors; nothing was left to do\n")


@pytest.mark.parametrize("fault", [ValueError("regex: it takes over 1 s"), CheckLostError("it has gone")])
def test_a_line_whose_grammar_is_not_compiled_again_is_refused_and_a_lost_check_ends_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    submit = OfflineLoop.submit

    def fails_for_two(loop: OfflineLoop, prompt: EncodedPrompt, *args: Any) -> str:
        if prompt.text == "two":
            raise fault
        return submit(loop, prompt, *args)

    lines = [completion("a"), completion("b", ["one", "two"]), completion("c")]
    with monkeypatch.context() as patch:
        patch.setattr(OfflineLoop, "submit", fails_for_two)
        lost = isinstance(fault, CheckLostError)
        assert run(lines) == (2 if lost else 3)
    if lost:
        assert run(lines) == 0
    records = by_name(tmp_path / "out.jsonl")
    statuses = {name: record["response"]["status_code"] for name, record in records.items()}
    assert statuses == {"a": 200, "b": 200 if lost else 400, "c": 200}
    if not lost:
        assert records["b"]["response"]["body"]["error"]["message"] == str(fault)

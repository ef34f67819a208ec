"""The official OpenAI client, unmodified, against the door."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
openai = pytest.importorskip("openai", reason="needs the official client")

from jaxserve import LLM  # noqa: E402
from jaxserve.plan import SamplingParams  # noqa: E402
from tests.fake_model import TEMPLATE, FakeModel, fake_limits  # noqa: E402
from tests.fake_sequence import expected_answer  # noqa: E402
from tests.server.harness import ENDLESS, TOKENIZER, expected  # noqa: E402
from tests.server.http.running import HttpServer, http_server  # noqa: E402

MESSAGES = [{"role": "user", "content": "Hello, you"}]
CHAT_PROMPT = TOKENIZER.apply_chat_template(MESSAGES)
GREEDY = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
LIBRARY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_gives_the_library_s_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, **GREEDY)
    tokens = expected_answer(fake_limits(), CHAT_PROMPT, LIBRARY, 0)[0]
    (choice,) = answer.choices
    assert choice.token_ids == tokens
    assert choice.message.role == "assistant"
    assert choice.message.content == TOKENIZER.decode(tokens)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.prompt_token_ids == CHAT_PROMPT
    assert answer.object == "chat.completion"
    assert answer._request_id == answer.id
    assert answer.model == "fake"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(CHAT_PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(CHAT_PROMPT) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0, "max_tokens": 20},
        {"seed": 3, "max_tokens": 20, "n": 2},
        {"seed": 4, "max_tokens": 20, "logprobs": 2, "stop": ["e", "a"]},
        {"temperature": 0, "max_tokens": 9, "min_tokens": 9, "allowed_token_ids": [1, 70, 71, 72]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_the_library_s(client: openai.OpenAI, asked: dict[str, Any], stream: bool) -> None:
    prompts = ["one", "another"]
    with LLM(FakeModel().opened(), progress=False) as llm:
        outputs = [
            sample for output in llm.generate(prompts, SamplingParams(**asked)) for sample in output.outputs
        ]
    answer = client.completions.create(
        model="fake", prompt=prompts, stream=stream, extra_body=asked | {"return_token_ids": True}
    )
    found = [Answer() for _ in outputs]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index].add(choice)
    assert [(one.token_ids, one.text, one.ends) for one in found] == [
        (sample.token_ids, sample.text, [(sample.finish_reason, sample.stop_reason)]) for sample in outputs
    ]
    if "logprobs" in asked:
        assert [one.logprobs for one in found] == [
            [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
            for sample in outputs
        ]


class Answer:
    """A completion choice, put together from its parts."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.ends: list[tuple[str, int | str | None]] = []

    def add(self, choice: Any) -> None:
        self.token_ids += choice.token_ids
        self.text += choice.text
        if choice.logprobs is not None:
            self.logprobs += choice.logprobs.token_logprobs
        if choice.finish_reason is not None:
            self.ends.append((choice.finish_reason, choice.stop_reason))


def test_streamed_chat_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    first, *middle, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.prompt_token_ids == CHAT_PROMPT
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == whole.choices[0].message.content
    assert [token for chunk in middle for token in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert [chunk.choices[0].finish_reason for chunk in middle if chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_without_a_limit_takes_the_rest_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == fake_limits().max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_has_the_last_word(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=9,
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 5


def test_seeded_samples_differ_and_come_again(client: openai.OpenAI) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    asked = {"max_tokens": 8, "n": 3, "seed": 7, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    wanted = [expected_answer(fake_limits(), CHAT_PROMPT, params, 7, sample)[0] for sample in range(3)]
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.token_ids for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == len(CHAT_PROMPT)
    assert answer.usage.completion_tokens == 24
    streamed: list[list[int]] = [[], [], []]
    for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice, "token_ids", [])
    assert streamed == wanted


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = GREEDY | {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, **asked)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [
        TOKENIZER.token_text(token) for token in answer.choices[0].token_ids
    ]
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace") == TOKENIZER.decode(
        answer.choices[0].token_ids, skip_special_tokens=False
    )
    assert all(len(entry.top_logprobs) == 2 and math.isfinite(entry.logprob) for entry in content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **asked)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    ids = [TOKENIZER.encode("one"), TOKENIZER.encode("two")]
    wanted = [expected("one", LIBRARY), expected("two", LIBRARY)]
    for prompt, answers in (
        ("one", wanted[:1]),
        (["one", "two"], wanted),
        (ids[0], wanted[:1]),
        (ids, wanted),
    ):
        answer = client.completions.create(model="fake", prompt=prompt, **GREEDY)
        assert [choice.token_ids for choice in answer.choices] == answers
        assert [choice.index for choice in answer.choices] == list(range(len(answers)))
        assert answer.usage.prompt_tokens == sum(len(one) for one in ids[: len(answers)])
        streamed: dict[int, list[int]] = {}
        for chunk in client.completions.create(model="fake", prompt=prompt, stream=True, **GREEDY):
            for choice in chunk.choices:
                streamed.setdefault(choice.index, []).extend(choice.token_ids)
        assert [streamed[index] for index in sorted(streamed)] == answers


def test_completions_have_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="one", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_echo_and_completion_logprobs(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="fake", prompt="one", **GREEDY)
    answer = client.completions.create(model="fake", prompt="one", echo=True, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    assert choice.text == "one" + plain.choices[0].text
    found = choice.logprobs
    ids = TOKENIZER.encode("one") + plain.choices[0].token_ids
    assert found.tokens == [TOKENIZER.token_text(token) for token in ids]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(math.isfinite(value) for value in found.token_logprobs[1:])
    assert all(token in top for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True))
    assert found.text_offset == [sum(map(len, found.tokens[:at])) for at in range(len(found.tokens))]
    streamed = list(client.completions.create(model="fake", prompt="one", echo=True, stream=True, **GREEDY))
    assert streamed[0].choices[0].text == "one"
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_stop_strings_and_ids(client: openai.OpenAI) -> None:
    tokens = expected("one", LIBRARY)
    answer = client.completions.create(
        model="fake",
        prompt="one",
        temperature=0,
        extra_body={"ignore_eos": True, "stop_token_ids": [tokens[3]], "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == tokens[3]
    assert choice.token_ids == tokens[:4]
    word = TOKENIZER.decode(tokens)[2:4]
    stopped = client.completions.create(model="fake", prompt="one", stop=[word], **GREEDY)
    assert stopped.choices[0].stop_reason == word
    assert word not in stopped.choices[0].text


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="one", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    found = answer.choices[0].prompt_logprobs
    ids = TOKENIZER.encode("one")
    assert found[0] is None
    assert all(str(token) in at for token, at in zip(ids[1:], found[1:], strict=True))


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake"
    assert model.max_model_len == fake_limits().max_model_len
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "out of range"),
        ({"top_p": 0}, "top_p", "out of range"),
        ({"n": 0}, "n", "out of range"),
        ({"max_tokens": 0}, "max_tokens", "out of range"),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs", "99"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "9999"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "cannot do"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown parameter"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words", "cannot do"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "only text",
        ),
    ],
)
def test_a_refusal_names_the_parameter(
    client: openai.OpenAI, changes: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(**({"model": "fake", "messages": MESSAGES} | changes))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}],
            }
        ],
        max_tokens=2,
        response_format={"type": "text"},
        tools=[],
        user="someone",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
    )
    assert answer.usage.completion_tokens <= 2


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


def test_a_prompt_that_never_fits_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="128"):
        client.completions.create(model="fake", prompt="x" * 300)


def test_many_asynchronous_streams_share_the_engine(server: HttpServer) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> list[int]:
        stream = await client.completions.create(model="fake", prompt=text, stream=True, **GREEDY)
        return [token async for chunk in stream for token in chunk.choices[0].token_ids]

    async def all_of_them(texts: list[str]) -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, text) for text in texts)))

    texts = [f"prompt {number}" for number in range(16)]
    assert asyncio.run(all_of_them(texts)) == [expected(text, LIBRARY) for text in texts]


def test_a_client_that_leaves_a_stream_aborts_it(server: HttpServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake",
        prompt="one",
        stream=True,
        max_tokens=ENDLESS.max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert server.service.engine.num_open == 1
    stream.close()
    server.wait_until_idle()


def test_the_chat_template_s_own_variables(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=1,
        extra_body={"add_generation_prompt": False, "return_token_ids": True},
    )
    assert "add_generation_prompt" in TEMPLATE
    assert answer.prompt_token_ids == TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=False)


@pytest.mark.parametrize(
    "variables", [{"messages": 1}, {"self": 1}, {"tools": 5}, {"documents": [1]}, {"odd": 1}, {"range": 5}]
)
def test_variables_of_a_chat_template_break_nothing(client: openai.OpenAI, variables: dict[str, Any]) -> None:
    with contextlib.suppress(openai.BadRequestError):
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=1, extra_body={"chat_template_kwargs": variables}
        )

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text import ChatTemplate

CHAT_DATA = Path(__file__).parent / "data" / "chat.json"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def templates(shared_data: Path) -> Path:
    return shared_data / "tokenizers/llamacpp_vectors/templates"


def stored() -> dict[str, Any]:
    return json.loads(CHAT_DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(stored()["rendered"]))
def test_real_templates_render_as_in_transformers(templates: Path, name: str) -> None:
    template = ChatTemplate((templates / f"{name}.jinja").read_text(encoding="utf-8"))
    expected = stored()["rendered"][name]
    assert any(isinstance(text, str) for text in expected.values())
    for conversation, text in expected.items():
        arguments = stored()["conversations"][conversation]
        if isinstance(text, str):
            assert template.render(**arguments) == text
        else:
            with pytest.raises(ValueError, match="the chat template refuses") as raised:
                template.render(**arguments)
            assert text["refuses"] in str(raised.value)


def test_no_template_goes_unchecked(templates: Path) -> None:
    assert {path.stem for path in templates.glob("*.jinja")} == set(stored()["rendered"])


@pytest.mark.oracle
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs the oracle extra")
def test_the_stored_texts_are_what_transformers_renders(templates: Path) -> None:
    from tests.text.regenerate_chat import render_all

    assert render_all(stored()["conversations"], templates) == stored()["rendered"]


def test_blocks_leave_no_blank_lines_and_loops_have_controls() -> None:
    template = ChatTemplate(
        "{% for message in messages %}\n"
        "  {% if loop.index0 == 1 %}\n"
        "    {% break %}\n"
        "  {% endif %}\n"
        "{{ message.content }}\n"
        "{% endfor %}\n"
    )
    assert template.render([USER, USER]) == "hi\n"


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ messages[0].content | tojson }}{{ tools | tojson(indent=1) }}")
    rendered = template.render([{"role": "user", "content": "<é&'>"}], tools=[{"b": 1}])
    assert rendered == '"<é&\'>"[\n {\n  "b": 1\n }\n]'


def test_the_generation_tag_is_transparent() -> None:
    template = ChatTemplate(
        "{% set x = 'a' %}{{ x }}"
        "{% generation %}{{ messages[0].content }}{% set x = 'b' %}{% endgeneration %}{{ x }}"
    )
    assert template.render([USER]) == "ahia"


def test_the_date_is_todays() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])
    assert year.isdigit()
    assert int(year) >= 2024


def test_text_parts_become_one_string_and_absent_values_are_absent() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].name is defined }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts, "name": None}]) == "one\ntwoFalse"


def test_what_is_not_given_is_none_and_what_is_given_by_name_arrives() -> None:
    template = ChatTemplate("{{ tools is none }} {{ documents is none }} {{ mood }}")
    assert template.render([USER], mood="good") == "True True good"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        (["hi"], "message 0 is 'hi'"),
        ([USER, {"content": "hi"}], "message 1 has role None"),
        ([{"role": "", "content": "hi"}], "message 0 has role ''"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": 3}], "message 0 has content 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content part {'type': 'image_url'}"),
    ],
)
def test_a_malformed_message_is_named(messages: list[Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate("{{ messages }}").render(messages)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('users only') }}", "refuses this conversation: users only"),
        ("{{ messages[0].content + 1 }}", "fails on this conversation: can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses this conversation: access to attribute 'append'"),
    ],
)
def test_a_template_that_fails_says_why(source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(source).render([USER])


def test_invalid_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="not valid Jinja: line 2"):
        ChatTemplate("ok\n{% if %}")


def test_a_mistyped_role_is_not_passed_over_in_silence() -> None:
    knows_two = ChatTemplate(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content | trim }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(
        ValueError, match="message 1 has role 'usr', which the chat template passes over; usual"
    ):
        knows_two.render([{"role": "user", "content": "a"}, {"role": "usr", "content": " b "}])
    assert knows_two.render([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]) == "a"
    shows_all = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% endfor %}")
    assert shows_all.render([{"role": "critic", "content": " b "}]) == "critic:b"

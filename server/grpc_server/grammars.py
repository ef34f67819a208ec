"""What an answer must be, as both protocols say it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2

from jaxserve.plan import Grammar
from server.core import ServiceError, Status
from server.proto.jaxserve.v1 import engine_pb2


def read_native_grammar(message: engine_pb2.Grammar) -> Grammar:
    """Raises ServiceError for a grammar that says nothing."""
    match message.WhichOneof("kind"):
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            return Grammar("json_schema", _given("grammar.json_schema", message.json_schema))
        case "regex":
            return Grammar("regex", _given("grammar.regex", message.regex))
        case "ebnf":
            return Grammar("ebnf", _given("grammar.ebnf", message.ebnf))
        case "choice":
            return _choice("grammar.choice", message.choice.texts)
    raise ServiceError(
        Status.INVALID_ARGUMENT,
        "grammar is empty: expected one of json_object, json_schema, regex, choice and ebnf",
    )


def read_vllm_grammar(message: vllm_engine_pb2.SamplingParams) -> Grammar | None:
    """Raises ServiceError for a constraint that says nothing, or that this server does not know."""
    match message.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return Grammar("json_schema", _given("json_schema", message.json_schema))
        case "regex":
            return Grammar("regex", _given("regex", message.regex))
        case "grammar":
            return Grammar("ebnf", _given("grammar", message.grammar))
        case "choice":
            return _choice("choice", message.choice.choices)
        case "json_object":
            return Grammar("json_object") if message.json_object else None
        case other:
            raise ServiceError(
                Status.UNIMPLEMENTED,
                f"{other}: this server holds answers to json_schema, json_object, regex, choice and grammar",
            )


def _given(name: str, text: str) -> str:
    if not text:
        raise ServiceError(Status.INVALID_ARGUMENT, f"{name} is empty")
    return text


def _choice(name: str, texts: Sequence[str]) -> Grammar:
    if not texts or not all(texts):
        raise ServiceError(
            Status.INVALID_ARGUMENT, f"{name} has no text to choose, or an empty one; expected at least one"
        )
    return Grammar("choice", json.dumps(list(texts), ensure_ascii=False))

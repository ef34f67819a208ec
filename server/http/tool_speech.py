"""Chooses how tool calls are found in a model's answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, get_args

from jaxserve.text import Tokenizer
from jaxserve.text.tools import TOOL_FORMATS, ToolFormat, detect_tool_format, new_call_id, shows_tools
from server.http.speech import CallingSpeech, PlainSpeech, Speech
from server.http.tools import ToolUse

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral"]
"""What an operator may say: a format, none at all, or the one that the model's chat template teaches."""
TOOL_PARSER_NAMES: tuple[ToolParserName, ...] = get_args(ToolParserName)

_log = logging.getLogger("jaxserve.server")


class ToolSpeech:
    """Makes the speech of samples, for the models of one server."""

    def __init__(self, parser_name: ToolParserName) -> None:
        self._parser_name = parser_name
        self._told: set[str] = set()
        """Models of which the log has been told that their calls are not found."""

    def choose(self, use: ToolUse | None, model: str, tokenizer: Tokenizer) -> Callable[[], Speech]:
        """What makes the speech of each sample of a request to this model."""
        if use is None:
            return PlainSpeech
        found = self._format(tokenizer)
        if use.forced:
            make_parser = use.forced_parser
        elif found is None:
            self._tell(model, tokenizer)
            return PlainSpeech
        else:
            make_parser = found.make_parser
        return lambda: CallingSpeech(make_parser(), lambda: new_call_id(found), parallel=use.parallel)

    def _format(self, tokenizer: Tokenizer) -> ToolFormat | None:
        if self._parser_name == "auto":
            return detect_tool_format(tokenizer)
        return TOOL_FORMATS.get(self._parser_name)

    def _tell(self, model: str, tokenizer: Tokenizer) -> None:
        if model in self._told:
            return
        self._told.add(model)
        if not shows_tools(tokenizer):
            reason = "its chat template shows the model no tools"
        elif self._parser_name == "none":
            reason = "the tool parser is none"
        else:
            reason = "its chat template teaches none of the formats known here"
        _log.warning("model %s: tool calls of its own choice stay text, as %s", model, reason)

"""What an operator may choose about the HTTP door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.http.tool_speech import TOOL_PARSER_NAMES, ToolParserName


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Limits of the HTTP door, who may use it, what it finds in answers.

    Raises ValueError for a limit that is not positive, or an unknown format.
    """

    tokens: Mapping[str, str] | None = None
    """Bearer tokens and the tenants that they stand for; None asks nobody for a token."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser, "*" for all; none by default."""
    tool_parser: ToolParserName = "auto"
    """The format in which every model writes tool calls of its own choice: "auto" is the one that its chat
    template teaches, "none" leaves them in the text."""
    max_body_bytes: int = 8 * 2**20
    """Of a request; more is a 413."""
    body_seconds: float = 60.0
    """In which a request's body must have arrived; else a 408."""
    stall_seconds: float = 60.0
    """How long a client may take no byte of its stream before its request is aborted."""

    def __post_init__(self) -> None:
        if self.tool_parser not in TOOL_PARSER_NAMES:
            raise ValueError(f"tool_parser {self.tool_parser!r} is none of {', '.join(TOOL_PARSER_NAMES)}")
        for name in ("max_body_bytes", "body_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: it must be above 0")

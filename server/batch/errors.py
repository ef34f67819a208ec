"""What is wrong with a line before there is a request in it."""

from __future__ import annotations


class LineError(Exception):
    """A line that asks for nothing that could be answered."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        """A fault.

        Args:
            code: a word for programs.
            message: a sentence for people.
            custom_id: the line's, if it has one.
        """
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id

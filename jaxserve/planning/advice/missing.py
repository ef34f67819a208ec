"""What a rule says that cannot be judged."""

from __future__ import annotations


class NotMeasured(Exception):
    """Something that a rule needs was not measured; the message says what it takes."""

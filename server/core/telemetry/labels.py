"""Label values out of what clients say, without letting them choose how many there are."""

from __future__ import annotations

OTHER = "other"
NONE = "none"


class BoundedLabels:
    """The first few values that are seen keep their names; all further ones are "other"."""

    def __init__(self, most: int) -> None:
        """`most`: how many names; 0 makes every one "other". Raises ValueError for fewer."""
        if most < 0:
            raise ValueError(f"{most} names are fewer than none")
        self._most = most
        self._known: set[str] = set()

    def label(self, value: str, *, learn: bool = True) -> str:
        """What stands for a value; "none" for the empty one. A new name is taken up only where `learn`."""
        if value in self._known:
            return value
        if not value:
            return NONE
        if not learn or len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value

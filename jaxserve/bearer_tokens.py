"""Files of bearer tokens, and the tenants that they stand for."""

from __future__ import annotations

from pathlib import Path


def read_tokens(path: Path) -> dict[str, str]:
    """The tenant of each token, from a file of lines `TENANT TOKEN`; blank ones and `# ...` are skipped.

    Raises ValueError, naming the line but never a token, for a file that is malformed or names no token.
    """
    tenants: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or ":" in words[0]:
            raise ValueError(f"{path}:{number}: expected a tenant, without a colon, and a token")
        if words[1] in tenants:
            raise ValueError(f"{path}:{number}: the token of tenant {words[0]!r} is in an earlier line too")
        tenants[words[1]] = words[0]
    if not tenants:
        raise ValueError(f"{path} names no token: nobody could be let in")
    return tenants

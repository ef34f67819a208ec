"""Three of the project's packages have names that other code may have too; this finds out in time."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

_SIBLINGS = ("pallas_kernels", "sharding", "server")


def check_siblings() -> None:
    """Raise ImportError, saying which file shadows which, unless Python finds jaxserve's own siblings."""
    home = Path(__file__).resolve().parent.parent
    for name in _SIBLINGS:
        own = home / name
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"jaxserve needs its own package {own}, and Python finds no {name} at all")
        found = _location(spec)
        if found.parent != own:
            raise ImportError(
                f"{found} shadows jaxserve's own package {own}: rename it, or put it later on the import path"
            )


def _location(spec: ModuleSpec) -> Path:
    """The file of a module or package; for a folder without `__init__.py`, a name inside it."""
    if spec.origin is not None:
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]).resolve() / "__init__.py"

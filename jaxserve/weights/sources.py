"""From what a user calls a model to where it lies on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from jaxserve.weights.catalogue import CATALOGUE, PullError, pull
from jaxserve.weights.manifest import MANIFEST

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_REASON_LEN = 300
# Other formats of the same weights lie in subfolders, or beside as Mistral's consolidated file.
_HUB_IGNORED = ["*/*", "consolidated*"]


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """The folder or GGUF file that a model's name stands for, downloaded first if need be.

    `name` is, in this order: a catalogue name (`smollm2-135m`; `./smollm2-135m` is a folder of that name),
    a folder in Hugging Face layout or from `jaxserve convert`, a `.gguf` file, or a hub id (`owner/name`).

    Raises ValueError for a name that is none of these, PullError where a download fails.
    """
    if name in CATALOGUE:
        return pull(name, progress=progress)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not any((path / name).exists() for name in ("config.json", MANIFEST)):
            raise ValueError(f"{path}: a folder without config.json; {_forms()}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path}: a file that does not end in .gguf; {_forms()}")
        return path
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{name!r} names no model and no file; {_forms()}")
    return _download_snapshot(name, progress)


def _forms() -> str:
    return (
        f"a model is a catalogue name ({', '.join(CATALOGUE)}), a folder in Hugging Face layout, "
        f"a .gguf file, or a hub id (owner/name)"
    )


def _download_snapshot(hub_id: str, progress: bool) -> Path:
    # Imported here: it takes a third of a second, and only a hub id needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
            tqdm_class=tqdm if progress else _SilentBar,
        )
    except HFValidationError as error:
        raise ValueError(f"{hub_id!r} is no valid hub id ({error}); {_forms()}") from error
    except LocalEntryNotFoundError as error:
        reason = "it cannot be reached, and the model is not in its cache; go online, or name a local copy"
        raise PullError(f"cannot fetch {hub_id!r} from the hub: {reason}; {_forms()}") from error
    except GatedRepoError as error:
        reason = "its owner asks for consent; give it on the model's page and log in with `hf auth login`"
        raise PullError(f"cannot fetch {hub_id!r} from the hub: {reason}") from error
    except RepositoryNotFoundError as error:
        reason = "it has no such model, or a private one; check the name, or log in with `hf auth login`"
        raise PullError(f"cannot fetch {hub_id!r} from the hub: {reason}; {_forms()}") from error
    except OSError as error:  # every other network and hub error of huggingface_hub is one too
        reason = " ".join(str(error).split())[:_REASON_LEN]
        raise PullError(f"cannot fetch {hub_id!r} from the hub: {reason}; {_forms()}") from error
    return Path(folder)


class _SilentBar(tqdm):
    """A bar that is never shown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})

"""What the answers of a batch were made with, beside them."""

from __future__ import annotations

from pathlib import Path

from jaxserve.run_manifest import ANSWER_PARTS, BATCH_PART, RunManifest


def keep_manifest(manifest: RunManifest, path: Path, *, first: bool) -> None:
    """Write a manifest, or hold it to the one that an earlier run has written.

    What changes answers by rounding at most may differ: the answers of such runs stand side by side, and each
    has the hash of its own, under which its manifest lies beside the first one: `FILE.HASH.json`.

    Args:
        manifest: of this run.
        path: where it is, or is to be.
        first: whether there are no answers yet: then it is written, over that of other answers too.

    Raises ValueError, naming each other difference, or the file where it is no manifest.
    """
    if first or not path.exists():
        manifest.write(path)
        return
    before = RunManifest.read(path)
    if drift := before.drift(manifest, (*ANSWER_PARTS, BATCH_PART)):
        raise ValueError(
            f"the answers that are there were made otherwise, as {path} says: {'; '.join(drift)}; "
            "answer as they were, or to another file"
        )
    if before.digest != manifest.digest:
        manifest.write(path.with_name(f"{path.stem}.{manifest.digest}.json"))

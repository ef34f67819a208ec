"""What the answers of a batch were made with, beside them."""

from __future__ import annotations

from pathlib import Path

from jaxserve.run_manifest import ANSWER_PARTS, BATCH_PART, RunManifest, check_place


class KeptManifest:
    """The manifest of a batch's answers, which outlives the runs that make them."""

    def __init__(self, path: Path, *, first: bool) -> None:
        """Read what an earlier run has written.

        Args:
            path: where it is, or is to be.
            first: whether there are no answers yet: then it is written over that of other answers too.

        Raises ValueError, naming the file, where no manifest can be written, or where there is none that this
        version reads.
        """
        check_place(path)
        self._path = path
        self._before = None if first or not path.exists() else RunManifest.read(path)

    def check(self, manifest: RunManifest) -> None:
        """Raise ValueError, naming each difference, where answers would be made otherwise than those that are
        there. What changes them by rounding at most may differ, the kernels too."""
        if self._before is None:
            return
        if drift := self._before.drift(manifest, (*ANSWER_PARTS, BATCH_PART)):
            raise ValueError(
                f"the answers that are there were made otherwise, as {self._path} says: {'; '.join(drift)}; "
                "answer as they were, or to another file"
            )

    def keep(self, manifest: RunManifest) -> None:
        """Write this run's down, complete: the first one's at the path, and what is only faster than that one
        beside it, as `FILE.HASH.json`: answers of all stand side by side. Raises as `check`."""
        self.check(manifest)
        if self._before is None:
            manifest.write(self._path)
        elif self._before.digest != manifest.digest:
            manifest.write(self._path.with_name(f"{self._path.stem}.{manifest.digest}.json"))

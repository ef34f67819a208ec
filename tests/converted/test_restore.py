"""Parameters go straight to the devices that hold them, and no byte is read twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count bytes read")
def test_a_mesh_holds_its_shards_and_one_device_reads_every_byte_once(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.converted.restore_on_mesh", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | DEVICES,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads(process.stdout)
    assert report["equal"]
    assert report["groups"] > 2
    assert report["shards"] == [[2, 1024, 512]] * 2
    assert 0.8 < report["read"] < 1.05

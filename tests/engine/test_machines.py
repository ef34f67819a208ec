"""Names of machines that need not be there."""

from __future__ import annotations

import pytest

from jaxserve.engine.machines import Machine


@pytest.mark.parametrize(
    ("name", "chip", "num_devices", "platform"),
    [
        ("v6e-8", "v6e", 8, "tpu"),
        ("v5p-4", "v5p", 4, "tpu"),
        ("v5e", "v5e", 1, "tpu"),
        ("h200", "h200", 1, "gpu"),
        ("h200-8", "h200", 8, "gpu"),
    ],
)
def test_a_name_says_chip_and_number(name: str, chip: str, num_devices: int, platform: str) -> None:
    machine = Machine.parse(name)
    assert (machine.chip, machine.num_devices, machine.platform) == (chip, num_devices, platform)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e-8x", "'v6e-8x' is not one of v5e, v5p, v6e, h200"),
        ("tpu-4", "'tpu-4' is not one of"),
        ("v6e-0", "v6e comes with 1 to 64 devices"),
        ("h200-16", "h200 comes with 1 to 8 devices"),
    ],
)
def test_a_machine_that_no_compiler_knows_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine.parse(name)

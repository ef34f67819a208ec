"""A batch in a process of its own, slow enough to be met in the middle: `fake_batch IN OUT`."""

from __future__ import annotations

import sys
from typing import Any

import jaxserve.cli
import jaxserve.opened_model
from server.batch.command import BATCH
from tests.fake_model import FakeModel
from tests.server.harness import PacedEngine


def main() -> int:
    """`jaxserve batch fake` on these files, as the command line runs it, installed or not."""

    def open_model(name: str, *, progress: bool) -> Any:
        return FakeModel(PacedEngine)

    jaxserve.opened_model.open_model = open_model
    jaxserve.cli.BUILT_IN = (BATCH,)
    return jaxserve.cli.main(["batch", "fake", *sys.argv[1:], "--num-slots", "4"])


if __name__ == "__main__":
    sys.exit(main())

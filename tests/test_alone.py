"""Who measures is alone, and who came later waits behind it."""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack
from pathlib import Path

from tests.alone import turn


def test_who_must_be_alone_waits_for_those_inside_and_others_wait_for_it(tmp_path: Path) -> None:
    inside: queue.SimpleQueue[str] = queue.SimpleQueue()
    leave = {name: threading.Event() for name in ("alone", "late")}

    def visit(name: str) -> None:
        with turn(tmp_path, alone=name == "alone"):
            inside.put(name)
            leave[name].wait(10)

    visitors = [threading.Thread(target=visit, args=(name,)) for name in leave]
    with ExitStack() as early:
        for _ in range(2):  # Who need not be alone is not.
            early.enter_context(turn(tmp_path, alone=False))
        for visitor in visitors:
            visitor.start()
            visitor.join(0.1)
        assert inside.empty()
    assert inside.get(timeout=10) == "alone"
    visitors[1].join(0.1)
    assert inside.empty()
    leave["alone"].set()
    assert inside.get(timeout=10) == "late"
    leave["late"].set()
    for visitor in visitors:
        visitor.join(10)

"""Run by a test: one process of a job, whose leader brings pages to its memory and back.

    python -m tests.sharding.page_member MODEL MESH KV_FORMAT [PLACE]

Prints for each cache group whether all bytes came back that had been written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from jaxserve.commands.processes import add_process_arguments, join_processes
from jaxserve.engine.build import build_engine
from jaxserve.engine.options import EngineOptions
from jaxserve.weights import open_checkpoint

PAGES = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 11]
"""More than one call moves."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name in ("mesh", "kv_format"):
        parser.add_argument(name)
    add_process_arguments(parser)
    args = parser.parse_args()
    join_processes(args)
    options = EngineOptions(
        mesh=args.mesh,
        kv_format=args.kv_format,
        max_model_len=64,
        max_chunk=16,
        num_slots=4,
        num_pages=16,
        host_kv_memory=2**20,
    )
    engine = build_engine(open_checkpoint(args.model), options)
    same: list[bool] = []
    for group, num_bytes in enumerate(engine.page_bytes):
        data = np.random.default_rng(group).integers(0, 256, (len(PAGES), num_bytes)).astype(np.uint8)
        before = engine.read_pages(group, [10]).take()
        engine.write_pages(group, PAGES, data)
        same.append(bool((engine.read_pages(group, PAGES[::-1]).take() == data[::-1]).all()))
        same.append(bool((engine.read_pages(group, [10]).take() == before).all()))
    print(json.dumps(same))


if __name__ == "__main__":
    main()

"""What is done with rows of logits, a block of rows after the other, so that nothing is as large as all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_ROWS = 32
"""Of a block: enough that a device's vector units are busy."""


def by_row_blocks(function: Callable[..., Any], *arrays: Any) -> Any:
    """What `function` gives of all rows, where it does the same with each.

    Args:
        function: of trees of arrays `[R, ...]` to such.
        arrays: these. Rows that do not fill blocks, or no more than one, are given at once.
    """
    num_rows = jax.tree.leaves(arrays)[0].shape[0]
    if num_rows <= _ROWS or num_rows % _ROWS:
        return function(*arrays)
    blocks = jax.tree.map(lambda array: array.reshape(-1, _ROWS, *array.shape[1:]), arrays)
    results = jax.lax.map(lambda block: function(*block), blocks)
    return jax.tree.map(lambda array: array.reshape(num_rows, *array.shape[2:]), results)

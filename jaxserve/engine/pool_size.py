"""How many pages the KV pool has: what all slots could ever hold, or what the memory allows."""

from __future__ import annotations

from jaxserve.config import KvFormat, ModelConfig
from jaxserve.engine.memory import default_pool
from jaxserve.model.stages import stages_of
from pallas_kernels.page_layout import PageLayout


def resolve_pages(
    model: ModelConfig,
    platform: str,
    *,
    kv_format: KvFormat,
    page_size: int,
    num_slots: int,
    max_model_len: int,
    step_rows: int,
    num_pages: int | None,
    kv_memory: int | None,
    draft: ModelConfig | None,
    num_stages: int = 1,
    num_replicas: int = 1,
) -> tuple[int, ...]:
    """Pages of each group in a replica: what all its slots could ever hold, or in proportion what the memory
    allows.

    Args:
        model: what is served.
        platform: of the devices.
        kv_format: of the pool.
        page_size: tokens of a page.
        num_slots: sequences at once in each replica.
        max_model_len: tokens of the longest.
        step_rows: tokens by which a window's pages may be ahead of those that are given back.
        num_pages: most of each group; None leaves them to the memory.
        kv_memory: bytes of the pools of all replicas; None takes what the platform's has by default.
        draft: a model with pools of its own, on the pages of full attention.
        num_stages: that share out the layers, with what is padding among them.
        num_replicas: with pools of their own.

    Raises ValueError, naming the bytes and the limit, where they hold less than two pages of a group.
    """
    wanted = [
        num_slots * -(-min(max_model_len, window + step_rows if window else max_model_len) // page_size) + 2
        for window in model.windows
    ]
    if num_pages is not None:
        return tuple(min(num_pages, most) for most in wanted)
    layers = stages_of(model, num_stages).model.layers * num_stages
    page_bytes = [
        _page_bytes(model, sum(kind.window == window for kind in layers), page_size, kv_format)
        + (_page_bytes(draft, draft.num_layers, page_size, kv_format) if draft and not window else 0)
        for window in model.windows
    ]
    budget = (kv_memory or default_pool(platform)) // num_replicas
    share = min(1.0, budget / sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True)))
    counts = tuple(int(pages * share) for pages in wanted)
    if min(counts) < 2:
        raise ValueError(
            f"{budget} bytes of KV memory hold {min(counts)} pages of {page_size} tokens "
            "in a cache group; at least 2 are needed"
        )
    return counts


def _page_bytes(model: ModelConfig, num_layers: int, page_size: int, kv_format: KvFormat) -> int:
    """Of a page of so many layers."""
    layout = PageLayout(page_size, model.num_kv_heads, model.head_size, 1, kv_format, kv_format)
    return layout.num_bytes(num_layers)

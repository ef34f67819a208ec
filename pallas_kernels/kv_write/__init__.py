"""KV write: a step's new keys and values into their pages, in place."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]

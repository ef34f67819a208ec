"""What a model weighs: parameters, bytes of weights, bytes of keys and values, from its configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.model.parameters import experts_of_replica, layer_parameters
from jaxserve.planning.meshes import ALONE, ChipMesh

WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1.0,
    "float8": 1.0,
    "int4": 0.5 + 2 / 32,
}
"""Bytes of a weight by format; int4 with a 2-byte scale for each group of 32. Scales of a whole channel
are too few to count."""

KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes of a stored number; those of one byte have a 4-byte scale for each head's key and value besides."""

_LANES = 128


@dataclass(frozen=True)
class Footprint:
    """Counts of one model, from which times and memory follow."""

    model: ModelConfig
    num_parameters: int
    """All of them, the embedding once where it is tied."""
    dense_weights: int
    """Weights of the layers' matrices, experts aside, that every row is multiplied with."""
    attention_weights: int
    """Those of them that make queries, keys, values and the sum of the heads."""
    expert_weights: int
    """Weights of all experts of all layers; a row is multiplied with `experts_per_token` of `num_experts`."""
    head_weights: int
    """Weights of the output head, which only rows that need logits are multiplied with."""

    @classmethod
    def of(cls, model: ModelConfig) -> Footprint:
        """Count the parameters that a model declares."""
        dense = attention = experts = others = 0
        for kind in model.layers:
            for name, info in layer_parameters(model, kind).items():
                size = math.prod(info.shape)
                if name.startswith("expert_"):
                    experts += size
                elif len(info.shape) > 1 and not name.endswith("bias"):
                    dense += size
                    attention += size if "kv_heads" in info.axes else 0
                else:
                    others += size
        table = model.vocab_size * model.hidden_size
        num_tables = 1 if model.tie_embeddings else 2
        total = dense + experts + others + num_tables * table + model.hidden_size
        return cls(model, total, dense, attention, experts, table)

    def weight_bytes(self, weight_format: str) -> float:
        """Bytes of all parameters, whose matrices are in a format. Raises ValueError for an unknown one."""
        return self.num_parameters * bytes_per_weight(weight_format)

    def active_weights(self, mesh: ChipMesh = ALONE) -> float:
        """Weights that one row is multiplied with on its way through the layers, by one chip of those that
        a mesh has along `tensor` and `expert`."""
        return self._of_a_chip(self._expert_share, mesh)

    def touched_weights(self, num_rows: float, mesh: ChipMesh = ALONE) -> float:
        """Weights that a step of so many rows reads: all dense ones, and the experts that any row chose.

        Rows are taken to choose experts independently and evenly. `mesh`: as of `active_weights`; where
        replicas share out experts, each chip has its part of them for the rows of all.
        """
        parts = self.num_expert_parts(mesh)
        return self._of_a_chip((1.0 - (1.0 - self._expert_share) ** (num_rows * parts)) / parts, mesh)

    def num_expert_parts(self, mesh: ChipMesh) -> int:
        """Into which a mesh's replicas share out the experts: one where each has all, or there are none."""
        model = self.model
        return model.num_experts // experts_of_replica(model, dict(mesh.axes)) if model.num_experts else 1

    def _of_a_chip(self, share: float, mesh: ChipMesh) -> float:
        """Its part, with a share of the experts."""
        others = self.dense_weights - self.attention_weights + share * self.expert_weights
        return self.attention_weights / mesh.tensor + others / mesh.across

    @property
    def _expert_share(self) -> float:
        model = self.model
        return model.experts_per_token / model.num_experts if model.num_experts else 0.0

    def layers_of(self, window: int) -> int:
        """Layers that share the cache group with this window."""
        return sum(kind.window == window for kind in self.model.layers)

    def kv_token_bytes(self, kv_format: str, window: int = 0) -> int:
        """Bytes of one token's keys and values in one layer times the group's layers, without padding."""
        model = self.model
        scale = 4 if _kv_bytes(kv_format) == 1 else 0
        head = model.head_size * _kv_bytes(kv_format) + scale
        return 2 * self.layers_of(window) * model.num_kv_heads * head

    def page_bytes(self, kv_format: str, page_size: int, window: int = 0) -> int:
        """Bytes that one page really takes in all layers of a group: heads fill whole rows of 128 lanes,
        a key and a value sharing one up to head size 64."""
        model = self.model
        half = 64 if model.head_size <= 64 else -(-model.head_size // _LANES) * _LANES
        scale = 4 if _kv_bytes(kv_format) == 1 else 0
        head = half * _kv_bytes(kv_format) + scale
        return 2 * self.layers_of(window) * model.num_kv_heads * head * page_size


def bytes_per_weight(weight_format: str) -> float:
    """Raises ValueError, listing the formats, for one that is not known."""
    if weight_format not in WEIGHT_BYTES:
        raise ValueError(f"weight format {weight_format!r} is not one of {', '.join(WEIGHT_BYTES)}")
    return WEIGHT_BYTES[weight_format]


def _kv_bytes(kv_format: str) -> int:
    if kv_format not in KV_BYTES:
        raise ValueError(f"KV format {kv_format!r} is not one of {', '.join(KV_BYTES)}")
    return KV_BYTES[kv_format]

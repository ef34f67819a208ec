"""What parameters a model has: one declaration gives each its shape and logical axes.

Weights are stored `[out, in]`, contracted over the last axis. Queries, keys and values are one matrix,
grouped by KV head (`[K, G + 2, h, D]`: a head's G queries, its key, its value), and so are gate and up
(`[2, F, D]`): fewer, wider products, and a shard of either holds whole heads or whole channels.

Names: `embed`, `head`, `final_norm`, and `layers.{i}.{name}`. Norm weights are the whole factor (a
checkpoint that stores `w` for `1 + w` is read as `1 + w`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxserve.config import LayerKind, ModelConfig

EXPERT_NAMES = ("expert_gate_up", "expert_down")


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter: its shape, and the logical name of each axis for sharding."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    full_precision: bool = False
    """Kept in float32 whatever the compute format: norms, biases and routers are small and sensitive."""
    num_input_axes: int = 1
    """Of a matrix: how many of the last axes are contracted."""

    @property
    def first_input_axis(self) -> str | None:
        """Of a matrix, the logical name of the first axis that is contracted."""
        return self.axes[-self.num_input_axes]

    def scale_axes(self, grouped: bool) -> tuple[str | None, ...]:
        """Logical axes of a quantised matrix's scales: they lie with their outputs; those of groups, which
        are runs of inputs, with their inputs too."""
        first_input = len(self.axes) - self.num_input_axes
        return self.axes[: first_input + 1] if grouped else self.axes[:first_input]


def layer_parameters(config: ModelConfig, kind: LayerKind) -> dict[str, ParameterInfo]:
    """The parameters of one layer of the given kind, by name, in a fixed order."""
    hidden, head = config.hidden_size, config.head_size
    groups = config.queries_per_kv + 2
    info: dict[str, ParameterInfo] = {"attn_norm": _norm(hidden)}
    info["qkv"] = ParameterInfo(
        (config.num_kv_heads, groups, head, hidden), ("kv_heads", None, None, "hidden")
    )
    if config.qkv_bias:
        info["qkv_bias"] = ParameterInfo(
            (config.num_kv_heads, groups, head), ("kv_heads", None, None), full_precision=True
        )
    if config.qk_norm:
        info["q_norm"] = _norm(head)
        info["k_norm"] = _norm(head)
    info["o"] = ParameterInfo(
        (hidden, config.num_kv_heads, config.queries_per_kv, head),
        ("hidden", "kv_heads", None, None),
        num_input_axes=3,
    )
    if config.post_norms:
        info["post_attn_norm"] = _norm(hidden)
    info["mlp_norm"] = _norm(hidden)
    if kind.experts:
        info["router"] = ParameterInfo((config.num_experts, hidden), (None, "hidden"), full_precision=True)
        info |= expert_parameters(config)
    else:
        width = config.intermediate_size
        info["gate_up"] = ParameterInfo((2, width, hidden), (None, "mlp", "hidden"))
        info["down"] = ParameterInfo((hidden, width), ("hidden", "mlp"))
    if config.post_norms:
        info["post_mlp_norm"] = _norm(hidden)
    return info


def experts_of_replica(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Experts that the devices of one replica have: their share, where the rest of the mesh cuts that as it
    would all of them, whole or in slices, or else all.

    `mesh`: the sizes of its axes.
    """
    share, rest = divmod(model.num_experts, mesh.get("data", 1))
    tensor, expert = mesh.get("tensor", 1), mesh.get("expert", 1)
    sliced = share % expert == 0 and model.expert_intermediate_size % tensor == 0
    return share if rest == 0 and (share % (tensor * expert) == 0 or sliced) else model.num_experts


def expert_parameters(config: ModelConfig) -> dict[str, ParameterInfo]:
    """The matrices of a layer's experts, in the order of EXPERT_NAMES."""
    experts, hidden, width = config.num_experts, config.hidden_size, config.expert_intermediate_size
    gate_up = ParameterInfo((experts, 2, width, hidden), ("experts", None, "expert_mlp", "hidden"))
    down = ParameterInfo((experts, hidden, width), ("experts", "hidden", "expert_mlp"))
    return dict(zip(EXPERT_NAMES, (gate_up, down), strict=True))


def model_parameters(config: ModelConfig) -> Iterator[tuple[str, ParameterInfo]]:
    """Every parameter of a model by its full name, in the order in which a checkpoint yields them."""
    table = ParameterInfo((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    yield "embed", table
    for index, kind in enumerate(config.layers):
        for name, info in layer_parameters(config, kind).items():
            yield f"layers.{index}.{name}", info
    yield "final_norm", _norm(config.hidden_size)
    if not config.tie_embeddings:
        yield "head", table


def _norm(size: int) -> ParameterInfo:
    return ParameterInfo((size,), (None,), full_precision=True)

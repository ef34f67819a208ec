"""One decoder-only transformer, driven by its config: every family, every batch.

Layers are segments, a repeating pattern and a count, run as a loop over the repetitions with the caches in
its carry (scanned over, the pool would be copied). Where a layer's matrices come from is the backend's
choice, see `LayerLoop`.

Axes: T token rows, S sequences, D hidden, K kv heads, G queries of a kv head, h head size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, LayerKind, ModelConfig, Segment
from jaxserve.model.attention import write_and_attend
from jaxserve.model.cache import CACHE_AXES, Cache, CacheGroup, LayerPlace, layer_places
from jaxserve.model.experts import expert_mlp
from jaxserve.model.layer_weights import LayerWeights
from jaxserve.model.layers import apply_rope, rope_kind, rope_tables
from jaxserve.model.parameters import EXPERT_NAMES, experts_of_replica, layer_parameters
from jaxserve.model.peaks import Peaks, SegmentPeaks, raise_peaks
from jaxserve.model.pipeline import Pipeline, Ropes, run_stages, run_tick
from jaxserve.model.rows import Rows
from jaxserve.model.spread import segment_specs, weight_specs
from jaxserve.model.stages import stages_of
from jaxserve.model.vocabulary import embed, head_logits
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention import AttentionParams
from pallas_kernels.rms_norm import add_and_rms_norm, rms_norm
from sharding import inside_shard, num_shards, per_shard, shard_sum

LayerLoop = Literal["stacked", "switched", "indexed", "unrolled"]
"""How the loop over layers finds a layer's matrices.

- stacked (TPU): one array for all repetitions, indexed inside the product; a dot fuses the slice there, and
  the kernel for quantised matrices takes the whole stack.
- switched (CPU): an array for each layer, and a branch for each around every product. A slice of a stack is
  copied on CPU, and unrolling compiles the rest of the layer 30 times over; a branch does neither.
- indexed (CPU with its own kernels): likewise, but int8 matrices are one array, indexed inside the product.
- unrolled (GPU): an array for each layer, and the loop written out.

Norms, biases, routers and scales are small and always stacked. So are experts: their kernel takes the stack.
"""

Params = Mapping[str, Any]
"""`embed`, `final_norm`, `head` unless tied, and `segments`: for each segment and each position in its
pattern the layer's parameters by name, an array `[count, ...]` or a tuple of `count` arrays. In place of any
matrix there may be a `QuantisedWeight`, of such arrays or tuples, and in place of a stack of them a
`StackedWeight`. On a mesh with stages the segments are those of `stages_of`, of which every stage has its
own: arrays `[stages * count, ...]`, or tuples of `count` arrays `[stages, ...]`."""

_ATTENTION_NAMES = ("qkv", "qkv_bias", "q_norm", "k_norm", "o")
_MLP_NAMES = ("gate_up", "down")

Carry = tuple[jax.Array, Cache, SegmentPeaks | None]
"""What goes from layer to layer: hidden states, caches, and the segment's peaks if they are asked for."""


@dataclass(frozen=True)
class Transformer:
    """The static half of a model on one platform; `forward` is pure."""

    config: EngineConfig
    layouts: tuple[PageLayout, ...]
    layer_loop: LayerLoop
    mesh: Mesh | None = None
    """The devices over which parameters and caches are spread; None for one device."""
    target: Target = field(default_factory=Target)
    """The kind of those devices, for which kernels are chosen; by default any."""

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    def forward(
        self,
        params: Params,
        cache: Cache,
        token_T: jax.Array,
        rows: Rows,
        *,
        single: bool,
        num_layers: int | None = None,
        keep_R: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states `[T, D]` before the final norm, and the caches with this step's tokens written.

        Args:
            single: every sequence has exactly one row.
            num_layers: stop after so many layers, without a pipeline; None goes through all.
            keep_R: int32 rows: only theirs are wanted, `[R, D]`; None for all.
        """
        if self.num_stages > 1:
            assert num_layers is None, "checked where engines are configured"
            return self._run_stages(params, cache, token_T, rows, single, keep_R)
        x_TD, cache, _ = self._run(params, (cache, None), token_T, rows, single, num_layers)
        return (x_TD if keep_R is None else x_TD[keep_R]), cache

    def observe(
        self, params: Params, cache: Cache, peaks: Peaks, token_T: jax.Array, rows: Rows
    ) -> tuple[jax.Array, Cache, Peaks]:
        """What `forward` gives, and the largest inputs of every matrix with these rows among them."""
        x_TD, cache, seen = self._run(params, (cache, peaks), token_T, rows, False, None)
        assert seen is not None
        return x_TD, cache, seen

    def _run(
        self,
        params: Params,
        state: tuple[Cache, Peaks | None],
        token_T: jax.Array,
        rows: Rows,
        single: bool,
        num_layers: int | None,
    ) -> tuple[jax.Array, Cache, Peaks | None]:
        """Through all layers; peaks are raised if there are any."""
        x_TD, ropes = self._enter(params, token_T, rows)
        num = self.model.num_layers if num_layers is None else num_layers
        return self._run_layers(params["segments"], x_TD, state, rows, ropes, single, num)

    def _enter(self, params: Params, token_T: jax.Array, rows: Rows) -> tuple[jax.Array, Ropes]:
        """What the first layer takes, and the rotary tables of all."""
        model = self.model
        x_TD = embed(params["embed"], token_T, model, self.config.compute_format, self.mesh)
        if model.embed_scale != 1.0:
            x_TD = x_TD * jnp.asarray(model.embed_scale, x_TD.dtype)
        kinds = dict.fromkeys(rope_kind(kind) for kind in model.layers)
        return x_TD, {kind: rope_tables(kind, model.head_size, rows.position_T) for kind in kinds}

    @property
    def num_stages(self) -> int:
        return num_shards("stages", self.mesh)

    def _run_stages(
        self,
        params: Params,
        cache: Cache,
        token_T: jax.Array,
        rows: Rows,
        single: bool,
        keep_R: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        """Through the layers as a pipeline."""
        x_TD, ropes = self._enter(params, token_T, rows)
        pipeline, platform = self._pipeline(params, single), self.target.platform
        return run_stages(pipeline, cache, x_TD, rows, ropes, keep_R, platform=platform, single=single)

    def tick(
        self, params: Params, cache: Cache, token_S: jax.Array, handed_NSD: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """What `run_tick` gives, of the tokens that enter and the rows of the groups in all stages."""
        x_SD, ropes = self._enter(params, token_S, rows)
        return run_tick(self._pipeline(params, True), cache, x_SD, handed_NSD, rows, ropes)

    def _pipeline(self, params: Params, single: bool) -> Pipeline:
        assert self.mesh is not None
        layers, num_layers = params["segments"], stages_of(self.model, self.num_stages).model.num_layers

        def run_own(
            layers: Any, x_TD: jax.Array, cache: Cache, rows: Rows, ropes: Ropes
        ) -> tuple[jax.Array, Cache]:
            return self._run_layers(layers, x_TD, (cache, None), rows, ropes, single, num_layers)[:2]

        return Pipeline(run_own, layers, segment_specs(layers, self.model, self.mesh), self.mesh)

    def _run_layers(
        self,
        layers: Any,
        x_TD: jax.Array,
        state: tuple[Cache, Peaks | None],
        rows: Rows,
        ropes: Ropes,
        single: bool,
        num_layers: int,
    ) -> tuple[jax.Array, Cache, Peaks | None]:
        """Through so many layers, in a pipeline of one stage's."""
        model, (cache, peaks) = stages_of(self.model, self.num_stages).model, state
        places = layer_places(model)
        seen: list[SegmentPeaks] = []
        for number, (segment, weights) in enumerate(zip(model.segments, layers, strict=True)):
            first = places[segment.first : segment.first + len(segment.pattern)]
            num_in_segment = min(max(num_layers - segment.first, 0), len(segment.pattern) * segment.count)
            carry = x_TD, cache, peaks[number] if peaks else None
            own = segment, weights, first, num_in_segment
            x_TD, cache, raised = self._run_segment(*own, carry, rows, ropes, single)
            seen += [raised] if raised else []
        return x_TD, cache, tuple(seen) or None

    def logits(self, params: Params, x_RD: jax.Array) -> jax.Array:
        """Float32 `[R, V]` of some rows' hidden states."""
        normed_RD = self._norm(x_RD, params["final_norm"])
        table_VD = params["embed" if self.model.tie_embeddings else "head"]
        return head_logits(table_VD, normed_RD, self.model, self.mesh, self.target)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, **self._norm_settings)

    @property
    def _norm_settings(self) -> dict[str, Any]:
        # XLA cuts rows over a mesh, which it cannot do in a kernel.
        target = self.target if self.mesh is None else replace(self.target, native=False)
        return {"eps": self.model.norm_eps, "exact_order": self.config.deterministic, "target": target}

    def _run_segment(
        self,
        segment: Segment,
        weights: tuple[Mapping[str, Any], ...],
        places: tuple[LayerPlace, ...],
        num_layers: int,
        carry: Carry,
        rows: Rows,
        ropes: Ropes,
        single: bool,
    ) -> Carry:
        """The first layers of a segment; `places` are those of its pattern's first repetition."""
        # A group's layers are numbered through, so each repetition moves on by as many as the pattern has.
        strides = [sum(other.group == place.group for other in places) for place in places]

        def repetition(number: jax.Array | int, carry: Carry, num: int | None = None) -> Carry:
            x_TD, cache, peaks = carry
            for i, kind in enumerate(segment.pattern[:num]):
                inputs: dict[str, jax.Array] | None = None if peaks is None else {}
                layer = LayerWeights(weights[i], number, self.target, inputs)
                group, first = places[i].group, places[i].index
                index = jnp.asarray(first + number * strides[i], jnp.int32)
                x_TD, cache = self._layer(kind, layer, group, index, x_TD, cache, rows, ropes, single)
                if peaks is not None and inputs is not None:
                    raised = raise_peaks(peaks[i], number, inputs, rows.valid_T)
                    peaks = (*peaks[:i], raised, *peaks[i + 1 :])
            return x_TD, cache, peaks

        count, rest = divmod(num_layers, len(segment.pattern))
        if self.layer_loop == "unrolled" or count == 1:
            for number in range(count):
                carry = repetition(number, carry)
        elif count:
            carry = jax.lax.fori_loop(0, count, repetition, carry)
        return repetition(count, carry, rest) if rest else carry

    def _layer(
        self,
        kind: LayerKind,
        layer: LayerWeights,
        group: int,
        index: jax.Array,
        x_TD: jax.Array,
        cache: Cache,
        rows: Rows,
        ropes: Ropes,
        single: bool,
    ) -> tuple[jax.Array, Cache]:
        """Attention and feed-forward, each with its norms and residual sum."""
        model = self.model
        normed_TD = self._norm(x_TD, layer.small("attn_norm"))
        rope = ropes[rope_kind(kind)]
        mixed_TD, cache = self._attention(kind, layer, group, index, normed_TD, cache, rows, rope, single)
        if model.post_norms:
            mixed_TD = self._norm(mixed_TD, layer.small("post_attn_norm"))
        mlp_norm = layer.small("mlp_norm")
        x_TD, normed_TD = add_and_rms_norm(x_TD, mixed_TD, mlp_norm, **self._norm_settings)
        if kind.experts:
            gate_up, down = (layer.experts(name) for name in EXPERT_NAMES)
            layer.see(EXPERT_NAMES[0], normed_TD)
            out_TD = expert_mlp(
                normed_TD,
                rows.valid_T,
                layer.small("router"),
                gate_up,
                down,
                layer.repetition,
                model,
                exact=self.config.deterministic,
                mesh=self.mesh,
                target=self.target,
                num_here=experts_of_replica(model, dict(self.config.mesh)),
            )
        else:
            mlp = self._per_shard(self._own_mlp, _MLP_NAMES, kind, layer, in_axes=((),), out_axes=())
            out_TD = mlp(normed_TD)
        if model.post_norms:
            out_TD = self._norm(out_TD, layer.small("post_mlp_norm"))
        return x_TD + out_TD, cache

    def _per_shard(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        kind: LayerKind,
        layer: LayerWeights,
        *,
        in_axes: tuple[Any, ...],
        out_axes: Any,
    ) -> Callable[..., Any]:
        """`function(weights, *operands)`, run by every device on its part of the layer's weights.

        Args:
            function: takes the LayerWeights of these names.
            names: of parameters, those left out that the layer does not have.
            kind, layer: the layer.
            in_axes: logical axes of each operand.
            out_axes: of the result.
        """
        if self.mesh is None or inside_shard(self.mesh):
            return functools.partial(function, layer)
        infos = layer_parameters(self.model, kind)
        own = {name: layer.parameters[name] for name in names if name in infos}
        specs = {name: weight_specs(entry, infos[name], self.mesh) for name, entry in own.items()}
        number = layer.repetition if isinstance(layer.repetition, int) else None

        def run_own(parameters: Mapping[str, Any], repetition: jax.Array, *operands: Any) -> Any:
            repetition_or_number = repetition if number is None else number
            return function(LayerWeights(parameters, repetition_or_number, self.target), *operands)

        run = per_shard(run_own, self.mesh, in_axes=(specs, (), *in_axes), out_axes=out_axes)
        return functools.partial(run, own, jnp.asarray(layer.repetition, jnp.int32))

    def _own_mlp(self, layer: LayerWeights, x_TD: jax.Array) -> jax.Array:
        """The gated feed-forward part: every device has some of its channels."""
        gate_up_T2F = layer.linear("gate_up", x_TD)
        gated_TF = gated_activation(gate_up_T2F, self.model.activation, target=self.target)
        return shard_sum(layer.linear("down", gated_TF), "mlp", self.mesh)

    def _attention(
        self,
        kind: LayerKind,
        layer: LayerWeights,
        group: int,
        index: jax.Array,
        x_TD: jax.Array,
        cache: Cache,
        rows: Rows,
        rope: tuple[jax.Array, jax.Array],
        single: bool,
    ) -> tuple[jax.Array, Cache]:
        """Attention of every device's own KV heads, and the cache with their pages written."""
        run = self._per_shard(
            functools.partial(self._own_attention, kind, group, single),
            _ATTENTION_NAMES,
            kind,
            layer,
            in_axes=((), CACHE_AXES, (), (), ()),
            out_axes=((), CACHE_AXES),
        )
        first_page = index * self.layouts[group].num_pages
        mixed_TD, updated = run(x_TD, cache[group], rows, rope, first_page)
        return mixed_TD, (*cache[:group], updated, *cache[group + 1 :])

    def _own_attention(
        self,
        kind: LayerKind,
        group: int,
        single: bool,
        layer: LayerWeights,
        x_TD: jax.Array,
        pages: CacheGroup,
        rows: Rows,
        rope: tuple[jax.Array, jax.Array],
        first_page: jax.Array,
    ) -> tuple[jax.Array, CacheGroup]:
        """Project, rotate, write the new keys and values to their pages, attend, project back."""
        model, num_rows = self.model, x_TD.shape[0]
        qkv = layer.linear("qkv", x_TD)
        q_THh = qkv[:, :, :-2].reshape(num_rows, -1, model.head_size)
        k_TKh, v_TKh = qkv[:, :, -2], qkv[:, :, -1]
        if model.qk_norm:
            q_THh = self._norm(q_THh, layer.small("q_norm"))
            k_TKh = self._norm(k_TKh, layer.small("k_norm"))
        q_THh, k_TKh = apply_rope(q_THh, *rope), apply_rope(k_TKh, *rope)
        mixed_THh, pages = write_and_attend(
            q_THh,
            k_TKh,
            v_TKh,
            pages,
            rows,
            group,
            first_page,
            layout=replace(self.layouts[group], num_kv_heads=k_TKh.shape[1]),
            params=AttentionParams(
                scale=model.attention_scale,
                window=kind.window,
                softcap=model.attn_softcap,
                context_block=self.config.context_block,
                # A tile of one row wastes the rest of it, which only the exact order makes dear.
                query_tile=4 if self.config.deterministic else 16,
                exact_order=self.config.deterministic,
            ),
            single=single,
            target=self.target,
        )
        mixed = mixed_THh.reshape(num_rows, -1, model.queries_per_kv, model.head_size)
        return shard_sum(layer.linear("o", mixed), "kv_heads", self.mesh), pages

"""What this machine takes for a model's steps, measured in seconds on numbers without meaning.

A model's shapes, its layers as many as make up a gibibyte, are compiled as the engine compiles them and
filled with random numbers; each rung of the ladder is timed full, and long contexts against short ones give
what attention takes. Of a larger model two cuts of different depth are timed: the difference is what a layer
takes. A small one is not cut, since on CPU a layer takes the longer the more there are to choose from. No
request is ever served here, and no weights are read: what becomes of batches, chunks and queues is for the
simulator.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import KvFormat, LayerKind, ModelConfig
from jaxserve.engine.build import layer_loop_for, local_target, resolve_dtype, resolve_here
from jaxserve.engine.compile_cache import compile_counter, enable_compilation_cache
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.programs import compile_programs
from jaxserve.model.layers import product_flat
from jaxserve.plan import SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.planning.chips import Chip
from jaxserve.planning.footprint import Footprint
from jaxserve.planning.measured import MeasuredCost, StepTimes, fit_times
from jaxserve.planning.plan_records import Sizes
from jaxserve.planning.precision import Precision
from jaxserve.quantization import recipe_in_force
from jaxserve.quantization.formats import format_named
from jaxserve.quantization.weight import QuantisedWeight, quantise
from jaxserve.sizes import default_sizes
from jaxserve.weights import cache_home

_CUT_BYTES = 2**30
"""Of the weights that are timed, in float32: far more than caches hold."""
_SHORT_CONTEXT = 16
_MATRIX = (8192, 2048)
_GEMM_ROWS = 256
_REPEATS = 10

Progress = Callable[[str], object]
"""Called with what is measured next."""


class Calibration:
    """This machine as the planner's target, for one model and one engine's sizes."""

    def __init__(
        self,
        model: ModelConfig,
        sizes: Sizes,
        *,
        kv_format: Literal["auto"] | KvFormat = "auto",
        on_progress: Progress = lambda stage: None,
    ) -> None:
        """Measures what any model can use; a precision's steps when they are asked for."""
        self._footprint = Footprint.of(model)
        self._page_size = default_sizes(on_cpu=True).page_size
        self._options = EngineOptions(
            num_slots=sizes.num_slots,
            max_chunk=sizes.max_chunk,
            max_model_len=sizes.max_model_len,
            kv_format=kv_format,
            page_size=self._page_size,
        )
        self._on_progress = on_progress
        self._costs: dict[str, MeasuredCost] = {}
        on_progress("measuring this machine's bandwidth and arithmetic")
        self.chip = measure_chip("cpu")

    def cost(self, precision: Precision) -> MeasuredCost:
        """What steps take in a precision, measured once.

        Raises ValueError, naming the value and the limit, for sizes that the model or the machine cannot
        meet.
        """
        if precision.name not in self._costs:
            dtype = "bfloat16" if precision.name == "bfloat16" else "auto"
            options = replace(self._options, quantize=precision.recipe, dtype=dtype)
            self._on_progress(f"measuring steps in {precision.name}")
            times = measure_steps(self._footprint.model, options)
            kv_format = options.kv_format
            if kv_format == "auto":
                kv_format = resolve_dtype(options, jax.default_backend())
            self._costs[precision.name] = MeasuredCost(
                self._footprint,
                self.chip,
                times,
                weight_format=precision.weight_format,
                compute_format=precision.compute_format,
                kv_format=kv_format,
                page_size=self._page_size,
            )
        return self._costs[precision.name]


def measure_chip(name: str) -> Chip:
    """This machine as a chip: what a product of one row reads, what one of many rows computes, its memory."""
    enable_compilation_cache(cache_home() / "compiled")
    compile_counter()
    matrix = jnp.ones(_MATRIX, jnp.float32)
    bandwidth = matrix.nbytes / _product_seconds(matrix, 1)
    operations = 2 * _GEMM_ROWS * matrix.size
    flops = {
        "float32": operations / _product_seconds(matrix, _GEMM_ROWS),
        "int8": operations / _product_seconds(quantise(matrix, format_named("int8"), 1), _GEMM_ROWS),
    }
    return Chip(
        name=name,
        flops=flops,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_bandwidth=bandwidth,
        link_bandwidth=0.0,
        step_overhead=0.0,
        source=f"measured just now on {os.cpu_count()} cores: a product of one float32 row with a matrix of "
        f"{_MATRIX[0]} x {_MATRIX[1]}, and of {_GEMM_ROWS} rows in float32 and int8",
    )


def _product_seconds(weight: jax.Array | QuantisedWeight, num_rows: int) -> float:
    target = local_target()
    rows = jnp.ones((num_rows, _MATRIX[1]), jnp.float32)
    multiply = jax.jit(lambda x, w: product_flat(x, w, target=target))
    return _best_seconds(lambda: multiply(rows, weight).block_until_ready())


def _best_seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs, after one that is not counted."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_steps(model: ModelConfig, options: EngineOptions) -> StepTimes:
    """The times of every step that an engine of these options compiles, on this machine.

    Raises ValueError, naming the value and the limit, for options that the model or the machine cannot meet.
    """
    enable_compilation_cache(cache_home() / "compiled")
    compile_counter()
    deep = deepest_cut(model, _CUT_BYTES)
    probe = _Probe(deep, options)
    many = {shape: probe.shape_seconds(shape) for shape in probe.shapes}
    decode_pair, chunk_pair = probe.pair_seconds()
    del probe  # And its weights.
    shallow, few = cut_model(model, 1), {}
    if deep != model:
        # Larger chunks have no more rows with logits than the smallest: what they do once is the same.
        probe = _Probe(shallow, replace(options, max_chunk=1))
        few = {shape: probe.shape_seconds(shape) for shape in probe.shapes}
    return fit_times(
        few,
        many,
        (shallow.num_layers, deep.num_layers),
        decode_pair_seconds=decode_pair,
        chunk_pair_seconds=chunk_pair,
        pairs={shape: timed_pairs(shape) for shape in many},
    )


def deepest_cut(model: ModelConfig, num_bytes: float) -> ModelConfig:
    """The model itself if its float32 weights are no more than that, or else as deep a cut as is.

    It is deeper than the shallowest cut in any case.
    """
    most = max(segment.count for segment in model.segments)
    for repeats in range(most, 2, -1):
        cut = cut_model(model, repeats)
        if Footprint.of(cut).weight_bytes("float32") <= num_bytes:
            return cut
    return cut_model(model, 2)


def cut_model(model: ModelConfig, repeats: int) -> ModelConfig:
    """The model with each segment's pattern of layers repeated so often at most."""
    layers: tuple[LayerKind, ...] = ()
    for segment in model.segments:
        layers += segment.pattern * min(repeats, segment.count)
    return replace(model, layers=layers)


def timed_pairs(shape: StepShape) -> int:
    """Pairs of query and key of the step by which a shape is timed."""
    if shape.decode:
        return shape.rows * _SHORT_CONTEXT
    return shape.rows * (shape.rows + 1) // 2


@dataclass(frozen=True)
class _Timed:
    """One way to fill a step."""

    shape: StepShape
    num_sequences: int
    start: int
    """Tokens of each sequence that are in the pool before it."""


class _Probe:
    """A cut of a model on an engine, its steps ready to be timed."""

    def __init__(self, model: ModelConfig, options: EngineOptions) -> None:
        # Each slot has all the pages that its longest sequence needs: none is ever granted one.
        config = resolve_here(model, replace(options, num_pages=2**31))
        target = local_target()
        layer_loop = layer_loop_for(target)
        programs = compile_programs(config, layer_loop, target=target)
        shapes = abstract_parameters(model, config.compute_format, layer_loop, recipe_in_force(config))
        self._engine = DeviceEngine(config, _made_up(shapes), programs)
        self._config = config

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """As the planner knows them: it has some for decoding alone, whether the engine has or not."""
        limits = self._engine.limits
        sizes = [min(shape.rows, limits.num_slots) for shape in limits.decoding_shapes]
        return (*(StepShape(size, size, size, decode=True) for size in sizes), *limits.chunk_shapes)

    def shape_seconds(self, shape: StepShape) -> float:
        """Of a full step with contexts as short as can be."""
        if shape.decode:
            return self._seconds(_Timed(shape, shape.rows, _SHORT_CONTEXT - 1))
        return self._seconds(_Timed(shape, 1, 0))

    def pair_seconds(self) -> tuple[float, float]:
        """Of a pair of query and key in one layer: in the largest decode step, in the largest chunk step."""
        limits, num_layers = self._engine.limits, self._config.model.num_layers
        chunk = limits.chunk_shapes[-1]
        start = max(limits.max_model_len - chunk.rows - _REPEATS - 2, 0)
        if not start:
            return 0.0, 0.0
        chunk_slope = self._slope(_Timed(chunk, 1, start)) / (num_layers * chunk.rows)
        decode = next(shape for shape in reversed(self.shapes) if shape.decode)
        return self._slope(_Timed(decode, decode.rows, start)) / (num_layers * decode.rows), chunk_slope

    def _slope(self, long: _Timed) -> float:
        """Seconds for each token that the sequences have more before the step."""
        first = _SHORT_CONTEXT - 1 if long.shape.decode else 0
        short = replace(long, start=first)
        return max(self._seconds(long) - self._seconds(short), 0.0) / max(long.start - first, 1)

    def _seconds(self, timed: _Timed) -> float:
        """The median of several steps, from dispatch to result, after one that is not counted."""
        rows = 1 if timed.shape.decode else timed.shape.rows
        shape = timed.shape
        if shape.decode:
            shape = self._engine.limits.fit(shape.rows, shape.rows, shape.rows, True)
        plan = StepPlan.of([SequencePlan(s, rows) for s in range(timed.num_sequences)], (), shape)
        times: list[float] = []
        for repeat in range(_REPEATS + 1):
            # Sequences that decode move on by a token a step; a chunk is computed once more.
            if repeat == 0 or not timed.shape.decode:
                for slot in range(timed.num_sequences):
                    self._engine.load_slot(self._load(slot, timed.start, rows))
            started = time.perf_counter()
            self._engine.collect(self._engine.dispatch(plan))
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def _load(self, slot: int, start: int, rows: int) -> SlotLoad:
        """A sequence of which `start` tokens are in the pool, on pages of its own."""
        cache, length = self._config.cache, self._config.max_model_len
        pages: list[tuple[int, ...]] = []
        for num_pages in cache.num_pages:
            own = (num_pages - 1) // self._config.num_slots
            first = 1 + slot * own
            pages.append(tuple(first + index % own for index in range(-(-length // cache.page_size))))
        return SlotLoad(
            slot=slot,
            tokens=[1] * (start + rows),
            num_prompt_tokens=start + rows,
            num_computed=start,
            pages=tuple(pages),
            params=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
            seed=0,
            sample_index=0,
        )


def _made_up(shapes: Any) -> Any:
    """Arrays of these shapes, of small random numbers: of what values they are times do not depend."""
    block = np.random.default_rng(0).standard_normal(2**20) * 0.02

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        small = np.resize(block * 1000 if jnp.issubdtype(shape.dtype, jnp.integer) else block, shape.shape)
        return jnp.asarray(small.astype(shape.dtype))

    return jax.tree.map(fill, shapes)

"""What kernels for NVIDIA GPUs through Mosaic GPU share, over the range of JAX's versions.

Importing it imports Mosaic GPU, which only programs for a GPU need.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
_LOAD_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters


def matrix_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory whose last two axes the matrix units and the copy engine read in the widest pattern."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    transforms = plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


def load_as(ref: Any, layout: Any) -> jax.Array:
    """A reference's numbers, spread over a warpgroup's registers in a given layout."""
    index: tuple[Any, ...] = ((),) if _LOAD_TAKES_INDEX else ()
    return plgpu.load(ref, *index, layout=layout)


def interpreter() -> Any:
    """What `plgpu.kernel` takes to run a kernel here. Raises ValueError where JAX has none that can."""
    parameters = getattr(plgpu, "InterpretGPUParams", None)
    if parameters is None:
        raise ValueError(f"jax {jax.__version__} does not interpret GPU kernels; 0.11.2 does")
    return parameters()

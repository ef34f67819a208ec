"""That the reader of compiled programs finds a planted copy, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from tests.compilers.hlo import whole_copies

LAYERS, OUT, IN = 3, 40, 24
STACK = jax.ShapeDtypeStruct((LAYERS, OUT, IN), jnp.float32)
X = jax.ShapeDtypeStruct((5, IN), jnp.float32)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)
SLICE, WHOLE = OUT * IN, LAYERS * OUT * IN


def compiled(function: Callable, *shapes: jax.ShapeDtypeStruct, donate: Sequence[int] = ()) -> str:
    return str(jax.jit(function, donate_argnums=donate).lower(*shapes).compile().as_text())


def test_a_slice_that_is_written_out_is_found() -> None:
    hlo = compiled(lambda stack, i: jax.lax.dynamic_index_in_dim(stack, i, keepdims=False) * 2, STACK, INDEX)
    assert len(whole_copies(hlo, {SLICE})) == 1


def test_an_array_that_is_only_read_is_not() -> None:
    assert whole_copies(compiled(jnp.sum, STACK), {SLICE, WHOLE}) == ()


def test_an_update_in_place_is_allowed_where_it_is_said_and_a_transposition_nowhere() -> None:
    update = compiled(lambda stack, i: stack.at[i].set(1.0), STACK, INDEX, donate=(0,))
    assert whole_copies(update, (), in_place={WHOLE}) == ()
    assert whole_copies(update, {WHOLE})
    hlo = "ENTRY %main (p: f32[3,40,24]) -> f32[24,40,3] {\n  %copy.1 = f32[24,40,3]{0,1,2} copy(%p)\n}\n"
    assert whole_copies(hlo, (), in_place={WHOLE}) == ("copy.1 copy f32[24,40,3]{0,1,2}",)


def test_what_stays_on_the_chip_or_inside_a_fusion_is_not_a_copy() -> None:
    hlo = """%fused (p: f32[960]) -> f32[1] {
  %copy.1 = f32[40,24]{1,0} copy(%p)
}

ENTRY %main (p: f32[960]) -> f32[1] {
  %start = (f32[960]{0:S(1)}, f32[960]{0}, u32[]) copy-start(%p)
  %copy.2 = f32[960]{0:T(1024)S(1)} copy-done(%start)
  ROOT %fusion = f32[1]{0} fusion(%copy.2), kind=kLoop, calls=%fused
}
"""
    assert whole_copies(hlo, {SLICE}) == ()
    assert whole_copies(hlo, {SLICE}, on_chip=True) == ("copy.2 copy-done f32[960]{0:T(1024)S(1)}",)
    assert whole_copies(hlo.replace("T(1024)S(1)", "T(1024)"), {SLICE}) == (
        "copy.2 copy-done f32[960]{0:T(1024)}",
    )

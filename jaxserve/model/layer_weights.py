"""The parameters of one layer, wherever the loop over layers finds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.model.layers import linear, product_flat, rounded_product
from jaxserve.model.stacked import stacked_product
from jaxserve.quantization.stacked import StackedWeight
from jaxserve.quantization.weight import QuantisedWeight
from pallas_kernels.dispatch import Target


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of one layer: those of its position in the pattern, and which repetition it is."""

    parameters: Mapping[str, Any]
    repetition: jax.Array | int
    target: Target
    inputs: dict[str, jax.Array] | None = None
    """Takes what each matrix is multiplied with, while the layer is traced; None where nobody asks."""

    def see(self, name: str, x: jax.Array) -> None:
        """Note the input `[T, *in]` of a matrix."""
        if self.inputs is not None:
            self.inputs[name] = x

    def small(self, name: str) -> jax.Array:
        """A norm, a bias or a router."""
        return self.parameters[name][self.repetition]

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """`[T, *out]`: x `[T, *in]` times one of the layer's matrices, plus its bias if it has one."""
        self.see(name, x)
        weight, biases = self.parameters[name], self.parameters.get(f"{name}_bias")
        if isinstance(weight, StackedWeight):
            return stacked_product(
                x, weight, self.repetition, out_type=x.dtype, target=self.target, bias=biases
            )
        bias = None if biases is None else biases[self.repetition]
        values = weight.values if isinstance(weight, QuantisedWeight) else weight
        if isinstance(weight, QuantisedWeight) and weight.format.row_bits and not isinstance(values, tuple):
            out = rounded_product(x, weight, self.repetition, target=self.target)
        elif not isinstance(values, tuple):
            return linear(x, jax.tree.map(self._own, weight), bias)
        elif isinstance(self.repetition, int):
            own = jax.tree.map(self._own, weight, is_leaf=lambda x: isinstance(x, tuple))
            out = product_flat(x, own, target=self.target)
        else:
            out = self._switched_product(x, weight, values)
        return (out if bias is None else out + bias[None]).astype(x.dtype)

    def _switched_product(self, x: jax.Array, weight: Any, values: tuple[jax.Array, ...]) -> jax.Array:
        """By whichever matrix is the layer's, of `values`."""

        def switch(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
            branches = [functools.partial(function, matrix) for matrix in values]
            return jax.lax.switch(self.repetition, branches, *operands)

        if isinstance(weight, QuantisedWeight):
            zeros = None if weight.zeros is None else self._own(weight.zeros)
            weight = QuantisedWeight(None, self._own(weight.scales), zeros, weight.format)
        return product_flat(x, weight, switch, target=self.target)

    def _own(self, stack: Any) -> jax.Array:
        """What an array over the repetitions, or a tuple of arrays, has for this one."""
        return stack[self.repetition]

    def experts(self, name: str) -> Any:
        """The stack `[count, E, ...]` of all repetitions' experts."""
        return self.parameters[name]

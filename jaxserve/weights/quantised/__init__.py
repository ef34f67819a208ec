"""Checkpoints whose weights are quantised already: AWQ, GPTQ, compressed-tensors, fp8, GGUF. Free of jax."""

from jaxserve.weights.quantised.modules import QuantisedModules, read_quantisation
from jaxserve.weights.quantised.parameter import StoredMatrix
from jaxserve.weights.quantised.scheme import Scheme

__all__ = ["QuantisedModules", "Scheme", "StoredMatrix", "read_quantisation"]

"""jaxserve: LLM inference on JAX for TPU, GPU and CPU."""

from jaxserve.plan import SamplingParams
from jaxserve.version import __version__

__all__ = ["SamplingParams", "__version__"]

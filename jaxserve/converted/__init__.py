"""Models converted once, to start from fast: Orbax checkpoints of parameters as the engine has them."""

from jaxserve.converted.convert import convert
from jaxserve.converted.parameters import restore_parameters, save_parameters

__all__ = ["convert", "restore_parameters", "save_parameters"]

"""Models converted once, to start from fast: Orbax checkpoints of parameters as the engine has them."""

from jaxserve.converted.calibration import Calibration, observe_peaks, read_calibration
from jaxserve.converted.convert import convert
from jaxserve.converted.parameters import restore_parameters, save_parameters

__all__ = [
    "Calibration",
    "convert",
    "observe_peaks",
    "read_calibration",
    "restore_parameters",
    "save_parameters",
]

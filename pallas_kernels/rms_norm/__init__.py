"""Root-mean-square norm of rows."""

from pallas_kernels.rms_norm.api import add_and_rms_norm, rms_norm

__all__ = ["add_and_rms_norm", "rms_norm"]

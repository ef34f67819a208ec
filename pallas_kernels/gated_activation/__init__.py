"""The gated activation of a feed-forward part."""

from pallas_kernels.gated_activation.api import gated_activation

__all__ = ["gated_activation"]

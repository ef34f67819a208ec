"""Checkpoints: where models come from, and readers that yield their parameters. Free of jax."""

from jaxserve.weights.catalogue import CATALOGUE, CatalogueEntry, PullError, cache_home, pull
from jaxserve.weights.checkpoint import Checkpoint, RegionOf, open_checkpoint
from jaxserve.weights.converted import AnyCheckpoint, ConvertedCheckpoint, open_any_checkpoint, open_converted
from jaxserve.weights.sources import resolve_model
from jaxserve.weights.stored_weights import StoredWeights

__all__ = [
    "CATALOGUE",
    "AnyCheckpoint",
    "CatalogueEntry",
    "Checkpoint",
    "ConvertedCheckpoint",
    "PullError",
    "RegionOf",
    "StoredWeights",
    "cache_home",
    "open_any_checkpoint",
    "open_checkpoint",
    "open_converted",
    "pull",
    "resolve_model",
]

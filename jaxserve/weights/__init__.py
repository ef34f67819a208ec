"""Checkpoints: where models come from, and readers that yield their parameters."""

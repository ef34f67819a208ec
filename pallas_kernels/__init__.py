"""Pallas kernels, one folder per operation."""

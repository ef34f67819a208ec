"""The transformer: pure functions on pytrees, one forward for every family and every batch."""

"""The scheduling half of the host: requests, pages, plans. Pure Python and numpy, never jax."""

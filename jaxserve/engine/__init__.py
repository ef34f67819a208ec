"""The device half: compiled steps over donated state."""

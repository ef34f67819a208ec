"""The serving benchmark of `jaxserve bench`."""

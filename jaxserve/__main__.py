"""`python -m jaxserve` is the command line."""

from jaxserve.cli import run

run()

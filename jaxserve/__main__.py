"""`python -m jaxserve` is the command line."""

import sys

from jaxserve.cli import main

sys.exit(main())

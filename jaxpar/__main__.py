"""`python -m jaxpar` is the command `jaxpar`."""

import sys

from jaxpar.cli.main import main

sys.exit(main())

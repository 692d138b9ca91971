"""`python -m millstream` runs the command `millstream`."""

import sys

from millstream.cli import main

sys.exit(main())

"""``python -m qkpipe``."""

import sys

from qkpipe.cli import main

sys.exit(main())

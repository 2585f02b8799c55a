"""`python -m edge0_runtime`, the same as the command `edge0_runtime`."""

import sys

from edge0_runtime.cli import main

sys.exit(main())

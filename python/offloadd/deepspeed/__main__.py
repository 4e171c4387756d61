"""python -m offloadd.deepspeed: as offloadd-run (launcher.py)."""

import sys

from .launcher import main

sys.exit(main())

"""One rank of offloadd-run."""

import sys

from .launcher import run_program

if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:]))

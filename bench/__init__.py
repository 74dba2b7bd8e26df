"""Benchmarks of Coterie compared with the limits of the machine: `python -m bench [name …]` prints JSON lines."""

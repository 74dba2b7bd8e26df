"""How fast Coterie is, beside what the machine can do: `python -m bench [name …]` prints JSON lines."""

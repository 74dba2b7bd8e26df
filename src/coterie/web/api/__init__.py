"""Routes under /api/v1."""

"""The API, one noun to a file."""

from __future__ import annotations

from fastapi import APIRouter

from coterie.web.routes import artifacts

ROUTERS: list[APIRouter] = [artifacts.router]
"""Mounted under /api/v1, in this order."""

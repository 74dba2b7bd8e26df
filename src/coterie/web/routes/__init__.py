"""The API, one noun to a file."""

from __future__ import annotations

from fastapi import APIRouter

ROUTERS: list[APIRouter] = []
"""Mounted under /api/v1, in this order."""

"""An app on a test society, and HTTP clients with and without the token."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from coterie.society import Society
from coterie.testing import FakeClock
from coterie.web.app import build_app
from coterie.web.auth import Access

TOKEN = "a-token-of-the-tests-0123456789abcdef"
BASE = "http://127.0.0.1:8642"


@pytest.fixture
def access(society: Society, clock: FakeClock) -> Access:
    return Access(TOKEN, society.store.info.log_id, clock)


@pytest.fixture
def app(society: Society, access: Access, clock: FakeClock) -> Starlette:
    return build_app(society, access, clock=clock)


@pytest.fixture
async def anonymous(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a token."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
        yield client


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        yield client

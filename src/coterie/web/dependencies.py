"""What a route asks for in its signature."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from coterie.runtime import Society
from coterie.web.access import Access


def _society(request: Request) -> Society:
    return cast(Society, request.app.state.society)


def _access(request: Request) -> Access:
    return cast(Access, request.app.state.access)


SocietyDep = Annotated[Society, Depends(_society)]
AccessDep = Annotated[Access, Depends(_access)]

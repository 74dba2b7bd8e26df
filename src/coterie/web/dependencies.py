"""What a route asks for in its signature."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from coterie.clock import Clock
from coterie.runtime import Society

# Coroutines all, though none waits: FastAPI takes a plain function to another thread.


async def _society(request: Request) -> Society:
    return cast(Society, request.app.state.society)


async def _clock(request: Request) -> Clock:
    return cast(Clock, request.app.state.clock)


SocietyDep = Annotated[Society, Depends(_society)]
ClockDep = Annotated[Clock, Depends(_clock)]

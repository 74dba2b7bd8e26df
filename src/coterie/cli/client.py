"""The running server, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from coterie.config import ServerAddress
from coterie.errors import HTTP_STATUS, Refused, ServerStopping, ServerUnusable

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 30.0
SILENCE_SECONDS = 35.0
"""The event stream is dead when nothing came for so long: the server pings every 15."""
API = "/api/v1"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    id: str | None
    kind: str
    data: Mapping[str, Any]


class Client:
    def __init__(self, address: ServerAddress, token: str) -> None:
        self._address = address
        if not token.isascii() or not token.isprintable():
            raise ServerUnusable("the token cannot be sent: it must be letters, digits and signs without spaces")
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            # A proxy of the environment must not see the token.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, **params: str | int | None) -> Any:
        given = {key: value for key, value in params.items() if value is not None}
        return await self._ask("GET", path, params=given)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._ask("POST", path, json={} if body is None else body)

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path)

    async def upload(self, file: Path) -> str:
        """The reference of the artifact it became."""
        with file.open("rb") as opened:
            kept = await self._ask("POST", "/artifacts", files={"file": (file.name, opened)})
        return str(kept["artifactRef"])

    async def _ask(self, method: str, path: str, **request: Any) -> Any:
        try:
            answer = await self._http.request(method, API + path, **request)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _check_answer(answer)
        return answer.json() if answer.content else None

    async def events(self, after: str | None = None) -> AsyncGenerator[ServerEvent, None]:
        """What the server tells, behind event `after`, until it or the connection ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        try:
            async with self._http.stream("GET", f"{API}/events", headers=headers, timeout=timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                _check_answer(answer)
                async with aclosing(_read_events(answer)) as events:
                    async for event in events:
                        yield event
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.TransportError) -> ServerUnusable:
        what = "does not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
        return ServerUnusable(
            f"process {self._address.pid} runs this society, but its server at {self._address.url} {what}:"
            " try again, or stop that process"
        )


def _check_answer(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    if answer.status_code == 401:
        raise ServerUnusable(
            "the running server does not accept this token: give the one it was started with by --token or"
            " COTERIE_TOKEN"
        )
    code, sentence = _problem(answer)
    if code == "stopping":
        raise ServerStopping(sentence)
    if code in HTTP_STATUS:
        raise Refused(code, sentence)
    raise ServerUnusable(f"the running server refused: {sentence} ({code})")


def _problem(answer: httpx.Response) -> tuple[str, str]:
    try:
        problem = answer.json()
        return str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code), "it gave no reason, so it may be no Coterie"


async def _read_events(answer: httpx.Response) -> AsyncGenerator[ServerEvent, None]:
    fields: dict[str, str] = {}
    async for line in _lines(answer):
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield ServerEvent(fields.get("id"), fields.get("event", "message"), json.loads(fields["data"]))
        fields = {}


async def _lines(answer: httpx.Response) -> AsyncGenerator[str, None]:
    # httpx would also split where only Unicode sees the end of a line, in the middle of what somebody said.
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
